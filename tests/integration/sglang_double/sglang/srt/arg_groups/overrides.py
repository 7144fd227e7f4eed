"""Settings as they were resolved at start."""

from __future__ import annotations

from typing import Any


def resolution_result(server_args: Any, field: str, default: Any = None) -> Any:
    return server_args.get(field, default)
