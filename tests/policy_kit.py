"""What tests of eviction policies share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Block:
    """An entry as policies see it."""

    key: bytes
    parent: bytes = b""
    depth: int = 0
    hits: int = 0
    touched_ns: int = 0
    prompt_tokens: int = 0
    saved: bool = False
    uses: int = 0
    grade: int = 0
