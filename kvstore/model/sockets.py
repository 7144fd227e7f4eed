"""Names of sockets: what a path may be, and what stands beside a data socket. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["FD_SUFFIX", "LOCK_SUFFIX", "UNIX_PATH_BYTES_MAX", "bytes_too_long"]

UNIX_PATH_BYTES_MAX: Final = 107
"""sun_path holds 108 with its closing zero (unix(7))."""
FD_SUFFIX: Final = ".fd"
"""Of the socket beside a data socket that hands memory over."""
LOCK_SUFFIX: Final = ".lock"


def bytes_too_long(path: str, *, data: bool) -> int:
    """By how many bytes a socket's path is too long; that of a data socket has to leave room for
    its fd socket's.
    """
    length = len(path.encode("utf-8", "surrogateescape")) + (len(FD_SUFFIX) if data else 0)
    return max(0, length - UNIX_PATH_BYTES_MAX)
