"""The disk tier's folder as one daemon has it: locked, opened, or set aside.

Promises. Two daemons never share a folder. What cannot be opened is renamed into `aside`, with the
reason in its name, and the folder begins anew: no start fails twice for one damage, and nothing is
removed while it is opened. Only the youngest set-aside is kept; `tidy` and `drop_aside` remove the
others later.

Everything here may wait for the device. Used by the tier's own thread, and by the daemon's start
for the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import uuid
from dataclasses import dataclass
from typing import Protocol

from kvstore import folders
from kvstore.model.reasons import Reason, StartError
from kvstore.tiers.disk.files import Files, SegmentFiles
from kvstore.tiers.disk.folder import (
    ASIDE_FOLDER,
    FORMAT_FILE,
    INDEX_FOLDER,
    INDEX_SCRATCH,
    LOCK_FILE,
    SEGMENTS_FOLDER,
    format_text,
    read_format_text,
)
from kvstore.tiers.disk.format import Fault
from kvstore.tiers.disk.index import LmdbIndex
from kvstore.tiers.disk.probe import DATA_FILE, Ahead, begin
from kvstore.tiers.disk.rows import Index, Unusable
from kvstore.tiers.disk.scratch import Held

log = logging.getLogger(__name__)

SETTING = "disk.path"
_FORMAT_BYTES_MAX = 4_096
_MISTAKES = (
    errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP,
    errno.EINVAL,
)  # fmt: skip
_BLOCK_BYTES = 512  # of st_blocks
_DRAFT = f"{FORMAT_FILE}.new"
_WORD = re.compile(r"[^A-Za-z0-9.]+")
_ASIDE_NAME = re.compile(r"(\d{1,9})-.*")


@dataclass(frozen=True)
class Opened:
    """A folder that can be used. set_aside: why an older content was set aside just now."""

    index: Index
    files: Files
    set_aside: str = ""


class Folder(Protocol):
    """Where a tier's index and files come from."""

    def open(self) -> Opened:
        """Opens what is there, or makes it. OSError: not now; another try may succeed."""
        ...

    def is_there(self) -> bool:
        """Whether what was opened, index and segments too, still lies under its name. OSError: it
        cannot be asked.
        """
        ...

    def set_aside(self, reason: str) -> None:
        """Moves index and segments away; both are closed. OSError: not now."""
        ...

    def aside_bytes(self) -> int:
        """Bytes of what was set aside."""
        ...

    def tidy(self) -> None:
        """Removes all set-asides but the youngest. OSError: not now."""
        ...

    def drop_aside(self) -> None:
        """Removes everything that was set aside. OSError: not now."""
        ...

    def close(self) -> None:
        """Gives the folder up. Idempotent."""
        ...


class DiskFolder:
    """A real folder; ours from the constructor to `close`."""

    def __init__(self, path: str) -> None:
        """Locks `path`, which is made if absent. StartError: START_LOCKED if another daemon has it,
        START_DISK if it never can be a folder of ours. If it is the device that cannot be used
        now, `open` says so, and may succeed later.
        """
        self.path = path
        self._held: list[Held] = []
        self._ahead: Ahead | None = None
        try:
            self._lock_fd = _lock(path)
        except BlockingIOError:
            lock = os.path.join(path, LOCK_FILE)
            detail = f"another process holds {lock}; give each daemon a folder of its own"
            raise StartError(Reason.START_LOCKED, detail, SETTING) from None
        except OSError as error:
            self._lock_fd = -1
            detail = f"cannot use {path}: {error.strerror}"
            if error.errno in _MISTAKES:
                raise StartError(Reason.START_DISK, detail, SETTING) from error
            log.error("disk tier: %s", detail)

    def examine_ahead(self) -> None:
        """Begins the examination of the index that is there, which `open` would wait for."""
        with contextlib.suppress(OSError):
            if self._holds_lock() and not strangers(self.path):
                self._ahead = begin(self._of(INDEX_FOLDER))

    def open(self) -> Opened:
        self._let_go()
        if not self._holds_lock():
            # The folder was removed or replaced: the lock that we hold keeps nobody out.
            self.close()
            self._lock_fd = _lock(self.path)
        reason = self._format_reason()
        if reason:
            self.set_aside(reason)
        self._make()
        segments = self._of(SEGMENTS_FOLDER)
        ahead, self._ahead = self._ahead, None
        try:
            index = LmdbIndex(self._of(INDEX_FOLDER), ahead=ahead)
        except Unusable as unusable:
            reason = str(unusable)
            self.set_aside(reason)
            self._make()
            index = LmdbIndex(self._of(INDEX_FOLDER))
        finally:
            if ahead is not None:
                ahead.close()
        try:
            for path in (segments, os.path.join(self._of(INDEX_FOLDER), DATA_FILE)):
                self._held.append(Held(path))
        except OSError:
            index.close()
            raise
        return Opened(index, SegmentFiles(segments), reason)

    def is_there(self) -> bool:
        try:
            return (
                self._holds_lock()
                and os.path.exists(self._of(FORMAT_FILE))
                and all(one.is_there() for one in self._held)
            )
        except FileNotFoundError:
            return False

    def set_aside(self, reason: str) -> None:
        aside = self._of(ASIDE_FOLDER)
        if os.path.lexists(aside) and not _is_folder(aside):
            raise NotADirectoryError(errno.ENOTDIR, "no folder of ours: move it away", aside)
        target = self._next_aside(_WORD.sub("-", reason)[:60])
        os.makedirs(target, mode=0o700)
        # The format file last: until it is gone the folder is known as one that has to move.
        for name in (SEGMENTS_FOLDER, INDEX_FOLDER, INDEX_SCRATCH, _DRAFT, FORMAT_FILE):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._of(name), os.path.join(target, name))
        for folder in (target, os.path.dirname(target), self.path):
            folders.sync(folder)
        log.error("disk tier set aside, starting cold: %s: kept as %s", reason, target)

    def aside_bytes(self) -> int:
        aside = self._of(ASIDE_FOLDER)
        return tree_bytes(aside) if _is_folder(aside) else 0

    def tidy(self) -> None:
        self._remove(self._asides()[:-1])

    def drop_aside(self) -> None:
        self._remove(self._asides())

    def close(self) -> None:
        self._let_go()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    # ------------------------------------------------------------------ parts

    def _of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for one in held:
            one.close()

    def _holds_lock(self) -> bool:
        try:
            there = os.stat(self._of(LOCK_FILE), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return self._lock_fd >= 0 and os.path.samestat(there, os.fstat(self._lock_fd))

    def _format_reason(self) -> str:
        """Why what is there is not ours to open, in a word; empty if it is, or nothing is there."""
        if strange := strangers(self.path):
            return f"strange-{strange[0]}"
        try:
            with open(self._of(FORMAT_FILE), "rb") as file:
                text = file.read(_FORMAT_BYTES_MAX)
        except FileNotFoundError:
            left = [name for name in (SEGMENTS_FOLDER, INDEX_FOLDER) if _filled(self._of(name))]
            return "no-format" if left else ""
        found = read_format_text(text)
        if isinstance(found, Fault):
            return found.text
        # Segments without an index name nobody.
        data = os.path.join(self._of(INDEX_FOLDER), DATA_FILE)
        if _filled(self._of(SEGMENTS_FOLDER)) and not os.path.exists(data):
            return "no-index"
        return ""

    def _make(self) -> None:
        for name in (SEGMENTS_FOLDER, INDEX_FOLDER):
            os.makedirs(self._of(name), mode=0o700, exist_ok=True)
        path = self._of(FORMAT_FILE)
        if not os.path.exists(path):
            draft = self._of(_DRAFT)
            with open(draft, "wb", opener=_private) as file:
                file.write(format_text(uuid.uuid4()))
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        # Always: whoever made what is there may have been killed before it was durable.
        for folder in (self._of(SEGMENTS_FOLDER), self._of(INDEX_FOLDER), self.path):
            folders.sync(folder)

    def _asides(self) -> list[str]:
        """Names of set-asides, the youngest last."""
        aside = self._of(ASIDE_FOLDER)
        names = os.listdir(aside) if _is_folder(aside) else []
        return sorted((name for name in names if _ASIDE_NAME.fullmatch(name)), key=_number)

    def _remove(self, asides: list[str]) -> None:
        """As many as can be; then OSError for one that cannot."""
        failed: OSError | None = None
        for name in asides:
            path = os.path.join(self._of(ASIDE_FOLDER), name)
            try:
                if _is_folder(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _next_aside(self, reason: str) -> str:
        asides = self._asides()
        number = _number(asides[-1]) + 1 if asides else 1
        return os.path.join(self._of(ASIDE_FOLDER), f"{number}-{reason}")


def strangers(path: str) -> list[str]:
    """What lies in a tier's folder under a name of ours and is no plain file or folder, as it has
    to be: a link leads out of it, a pipe would be waited for. OSError if it cannot be asked.
    """
    kinds = {
        FORMAT_FILE: stat.S_ISREG,
        _DRAFT: stat.S_ISREG,
        SEGMENTS_FOLDER: stat.S_ISDIR,
        INDEX_FOLDER: stat.S_ISDIR,
        INDEX_SCRATCH: stat.S_ISDIR,
    }
    found = []
    for name, is_right in kinds.items():
        with contextlib.suppress(FileNotFoundError):
            if not is_right(os.lstat(os.path.join(path, name)).st_mode):
                found.append(name)
    return found


def _lock(path: str) -> int:
    """A descriptor that holds the folder's lock. BlockingIOError: another has it; OSError, of it
    NotOurs.
    """
    folders.prepare(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(os.path.join(path, LOCK_FILE), flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def tree_bytes(folder: str) -> int:
    """Bytes on the device of everything in a folder; what goes meanwhile is left out."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * _BLOCK_BYTES
    return total


def _is_folder(path: str) -> bool:
    """A real one, no link to one. OSError if it cannot be asked."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _filled(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(True for _ in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _number(name: str) -> int:
    return int(name.partition("-")[0])
