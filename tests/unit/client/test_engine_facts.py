"""What every engine's facts are made of, without an engine."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace

from kvstore.model.fingerprint import Identity
from kvstore_client.engines.engine_facts import commit_of, identity_of, name_of, plain


@dataclasses.dataclass
class Rope:
    theta: float
    factors: tuple[int, ...]


def test_what_an_engine_says_becomes_plain_and_its_order_does_not_count() -> None:
    names = [f"layer {number}" for number in range(50)]
    told = {"rope": Rope(1e4, (1, 2)), "skip": set(names), 7: None, "type": Rope}
    assert plain(told) == {
        "rope": {"theta": 1e4, "factors": [1, 2]},
        "skip": sorted(names),
        "7": None,
        "type": str(Rope),
    }
    random.Random(1).shuffle(names)
    assert plain(frozenset(names)) == plain(set(names))


@dataclasses.dataclass
class Loaded:
    model: str = "org/model"
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    config: dict[str, object] = dataclasses.field(default_factory=lambda: {"layers": 2})
    settings: dict[str, object] = dataclasses.field(default_factory=lambda: {"x": 1})
    load_format: str = "auto"


def identity(
    engine: str, facts: Loaded, *, named: bool = True, name: str = "", revision: str = ""
) -> Identity:
    return identity_of(
        engine,
        facts,
        commit_names_weights=named,
        model_name=name,
        weights_revision=revision,
        weight_epoch=3,
    )


def test_engines_of_another_kind_or_setting_have_another_digest() -> None:
    one = identity("a", Loaded()).config_digest
    assert one is not None
    assert one == identity("a", Loaded()).config_digest
    others = [
        identity("b", Loaded()),
        identity("a", Loaded(config={"layers": 3})),
        identity("a", Loaded(settings={"x": 2})),
        identity("a", Loaded(load_format="gguf")),
    ]
    assert len({one, *(other.config_digest for other in others)}) == 5
    assert identity("a", Loaded(config={"no form": object()})).config_digest is None


def test_the_operator_names_a_model_or_its_files_do() -> None:
    told = identity("a", Loaded(), name="mine", revision="r7")
    assert (told.model_name, told.weights_revision, told.weight_epoch) == ("mine", "r7", 3)
    found = identity("a", Loaded())
    assert (found.model_name, found.weights_revision) == ("org/model", f"commit:{Loaded().commit}")
    assert identity("a", Loaded(), named=False).weights_revision is None


def test_only_a_whole_commit_names_weights() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert commit_of(SimpleNamespace(_commit_hash=commit)) == commit
    for other in (commit[:7], "main", None, 5):
        assert commit_of(SimpleNamespace(_commit_hash=other)) == ""
    assert commit_of(SimpleNamespace()) == ""


def test_a_folder_is_named_by_its_last_part(tmp_path: Path) -> None:
    assert name_of(str(tmp_path / "..") + f"/{tmp_path.name}/") == tmp_path.name
    assert name_of("org/model") == "org/model"
