"""What every engine's facts have in common: a configuration as plain values, the commit that it is
of, the name and the digest that go into a fingerprint. Pure, and imports no engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from kvstore.model.fingerprint import Identity
from kvstore_client.effective_config import effective_config_digest

__all__ = ["GGUF", "EngineFacts", "commit_of", "identity_of", "name_of", "plain", "plain_mapping"]

COMMIT_DIGITS: Final = 40
GGUF: Final = "gguf"
"""Of a commit's files in this format one is loaded, and the commit does not tell which."""


class EngineFacts(Protocol):
    """What `identity_of` needs. model: path or id. commit: as `commit_of`. config: in effect, as
    nested plain values. settings: further ones that change K or V.
    """

    @property
    def model(self) -> str: ...
    @property
    def commit(self) -> str: ...
    @property
    def config(self) -> Mapping[str, object]: ...
    @property
    def settings(self) -> Mapping[str, object]: ...
    @property
    def load_format(self) -> str: ...


def commit_of(hf_config: Any) -> str:
    """The hub's commit that the configuration is of, "" if it is none of the hub's."""
    commit = getattr(hf_config, "_commit_hash", None)
    known = isinstance(commit, str) and len(commit) == COMMIT_DIGITS
    return str(commit) if known else ""


def plain_mapping(value: Mapping[Any, Any]) -> dict[str, object]:
    """`plain` of each value, by the text of its name."""
    return {str(name): plain(item) for name, item in value.items()}


def plain(value: Any) -> object:
    """As effective_config_digest takes it; what it does not know, by its text."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return plain_mapping(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return str(value)


def name_of(model: str) -> str:
    """The name of a model's folder; the model's id where it is no folder."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def identity_of(
    engine: str,
    facts: EngineFacts,
    *,
    commit_names_weights: bool,
    model_name: str,
    weights_revision: str,
    weight_epoch: int,
) -> Identity:
    """Which model it is. model_name "": by its path or id; equal for engines that share.
    weights_revision: what the operator vouches for; "": the hub's commit if it names what was
    loaded, else unknown.
    """
    revision = weights_revision or None
    if revision is None and commit_names_weights:
        revision = f"commit:{facts.commit}"
    return Identity(
        model_name=model_name or name_of(facts.model),
        weights_revision=revision,
        weight_epoch=weight_epoch,
        config_digest=_config_digest(engine, facts),
    )


def _config_digest(engine: str, facts: EngineFacts) -> str | None:
    """Of the configuration in effect and the engine's settings; None, which is held, if they have
    no canonical form.
    """
    try:
        named = {**facts.settings, "load_format": facts.load_format}
        of_engine = {f"{engine}.{name}": value for name, value in named.items()}
        return effective_config_digest({**facts.config, **of_engine})
    except (TypeError, ValueError):
        return None
