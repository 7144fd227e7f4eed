"""Reads files that decide who may come in: keys, certificates, tokens.

Promise. What `read` gives back was in a plain file of ours or of root's, which nobody else could
have written, nor, if it is secret, have read. Errors name the setting and never the content.
Callers: `identity` and `tls`, at the start and at a reload.
"""

from __future__ import annotations

import os
import stat

from kvstore import folders
from kvstore.config.knob import wrong

BYTES_MAX = 256 << 10
"""A bundle of authorities is the largest of them."""


def read(path: str, setting: str, *, secret: bool) -> bytes:
    """The content of a file. Raises StartError if it is missing, empty, too large or too open.

    A secret file may be readable by its group only if it is root's and we are not, as a mounted
    Kubernetes secret is.
    """
    try:
        folders.check_way(path)
        # Not blocking: to open a pipe would wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            _check(path, setting, found, secret=secret)
            with open(fd, "rb", closefd=False) as file:
                content = file.read(BYTES_MAX + 1)
        finally:
            os.close(fd)
    except folders.Exchangeable as error:
        raise wrong(setting, error.detail) from None
    except OSError as error:
        raise wrong(setting, f"cannot read {path}: {error.strerror}") from None
    if not content.strip():
        raise wrong(setting, f"{path} is empty")
    if len(content) > BYTES_MAX:
        raise wrong(setting, f"{path} has more than {BYTES_MAX} bytes")
    return content


def _check(path: str, setting: str, found: os.stat_result, *, secret: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise wrong(setting, f"{path} is no file")
    uid = os.geteuid()
    if found.st_uid not in (uid, 0):
        raise wrong(setting, f"{path} belongs to user {found.st_uid}, not to us")
    closed = 0o077 if secret else 0o022
    if secret and found.st_uid == 0 != uid:
        closed = 0o037
    if found.st_mode & closed:
        mode = stat.S_IMODE(found.st_mode)
        whom = "others may read or write it" if secret else "others may write it"
        raise wrong(setting, f"{path} has mode {mode:04o}: {whom}; chmod 0600 it")
