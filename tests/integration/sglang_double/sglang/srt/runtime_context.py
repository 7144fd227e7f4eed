"""What a process has published of its configuration. Tests set `started` and `now`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

started: dict[str, Any] = {}
"""Settings of the start, by name. Empty: nothing has been published."""
now: dict[str, Any] = {}
"""What became of them since."""
overrides: list[tuple[str, dict[str, Any]]] = []
"""Who changed which of them."""
model_config: Any = None


def _published() -> SimpleNamespace:
    if not started:
        raise ValueError("not published")
    return SimpleNamespace(**{**started, **now})


def get_server_args() -> dict[str, Any]:
    return started


def get_context() -> SimpleNamespace:
    return SimpleNamespace(overrides_log=lambda: list(overrides))


def process_model_config() -> Any:
    _published()
    return model_config


def attention_backends() -> tuple[str, str]:
    return str(_published().attention_backend), str(_published().attention_backend)


get_device = get_exec = get_lora = get_model = get_serving = _published
