"""What every engine's facts have in common: a configuration as plain values, the commit that it is
of, the name and the digest that go into a fingerprint. Pure, and imports no engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvstore_client.effective_config import effective_config_digest

__all__ = ["GGUF", "commit_of", "config_digest", "name_of", "plain", "plain_mapping"]

COMMIT_DIGITS: Final = 40
GGUF: Final = "gguf"
"""Of a commit's files in this format one is loaded, and the commit does not tell which."""


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


def config_digest(
    engine: str, config: Mapping[str, object], settings: Mapping[str, object], load_format: str
) -> str | None:
    """Of the configuration in effect and the engine's settings; None, which is held, if they have
    no canonical form.
    """
    try:
        named = {**settings, "load_format": load_format}
        of_engine = {f"{engine}.{name}": value for name, value in named.items()}
        return effective_config_digest({**config, **of_engine})
    except (TypeError, ValueError):
        return None
