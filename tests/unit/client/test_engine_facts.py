"""What every engine's facts are made of, without an engine."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace

from kvstore_client.engines.engine_facts import commit_of, config_digest, name_of, plain


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


def test_engines_of_another_kind_or_setting_have_another_digest() -> None:
    one = config_digest("a", {"layers": 2}, {"x": 1}, "auto")
    assert one is not None
    assert one == config_digest("a", {"layers": 2}, {"x": 1}, "auto")
    others = [
        config_digest("b", {"layers": 2}, {"x": 1}, "auto"),
        config_digest("a", {"layers": 3}, {"x": 1}, "auto"),
        config_digest("a", {"layers": 2}, {"x": 2}, "auto"),
        config_digest("a", {"layers": 2}, {"x": 1}, "gguf"),
    ]
    assert len({one, *others}) == 5
    assert config_digest("a", {"no form": object()}, {}, "auto") is None


def test_only_a_whole_commit_names_weights() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert commit_of(SimpleNamespace(_commit_hash=commit)) == commit
    for other in (commit[:7], "main", None, 5):
        assert commit_of(SimpleNamespace(_commit_hash=other)) == ""
    assert commit_of(SimpleNamespace()) == ""


def test_a_folder_is_named_by_its_last_part(tmp_path: Path) -> None:
    assert name_of(str(tmp_path / "..") + f"/{tmp_path.name}/") == tmp_path.name
    assert name_of("org/model") == "org/model"
