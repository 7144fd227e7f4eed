"""Which weights a model has, told by their content and never by a path or a served name.

`WeightsDigest` hashes config and weight files in a thread of its own, so that an engine's start
never waits: until the digest is known `result_if_ready()` is None, the fingerprint stays
incomplete, and the daemon holds what is pushed. A digest is remembered on disk per file under
(device, inode, size, mtime_ns, ctime_ns) together with some sampled pages, which are hashed again
before a remembered digest is believed.

`effective_config_digest` (from `kvstore_client.effective_config`) names what a model's
configuration does to K and V.

Promises: two sets of files with different bytes have different digests; a file that changes while
it is hashed gives no digest; a broken, foreign or stale memory costs a recomputation, never a wrong
digest that the stamp or a sample could have told. Needs neither torch nor the daemon. Used by the
engine adapters and by applications.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore_client.effective_config import effective_config_digest

__all__ = [
    "DigestCancelledError",
    "DigestMemory",
    "FileStamp",
    "WeightsDigest",
    "WeightsError",
    "effective_config_digest",
    "files_digest",
    "weight_files",
]

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 8 << 20
PAGE_BYTES: Final = 4096
SAMPLED_PAGES: Final = 16
# A file whose inode changed less than this before it was read may change again within one tick of
# the file system's clock and keep its stamp; such a digest is used, but not remembered.
SETTLED_NS: Final = 2_000_000_000
READ_ATTEMPTS: Final = 3

WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Beside the weights: what changes how they are read (configuration, shard index, quantisation,
# custom code).
CONFIG_NAMES: Final = (
    "config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "adapter_config.json",
    "params.json",
)


class WeightsError(Exception):
    """The weights cannot be told: no weight file there, unreadable, or changing while they are
    read."""


class DigestCancelledError(WeightsError):
    """The digest was given up by `close()`."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What the file system says of a file without reading it. ctime cannot be set by a program,
    mtime can."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        return cls(
            device=status.st_dev,
            inode=status.st_ino,
            size_bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
        )

    def name(self) -> str:
        """A file name that belongs to this stamp alone."""
        packed = struct.pack(
            "<QQQqq", self.device, self.inode, self.size_bytes, self.mtime_ns, self.ctime_ns
        )
        return hashlib.sha256(packed).hexdigest()


@dataclass(frozen=True, slots=True)
class _Remembered:
    sha256: str
    pages: tuple[tuple[int, str], ...]


class DigestMemory:
    """Digests of files seen before, one small JSON file each in a folder of this user's own.

    `folder`: default `$XDG_CACHE_HOME/kvstore/weights`, else `~/.cache/kvstore/weights`. A folder
    that others may write to is not believed and not written. Every failure of the memory is a
    digest that is computed again.
    """

    def __init__(self, folder: Path | None = None, *, chance: random.Random | None = None) -> None:
        self.folder = folder if folder is not None else default_memory_folder()
        self._chance = chance if chance is not None else random.SystemRandom()

    def recall(self, stamp: FileStamp, descriptor: int) -> str | None:
        """The remembered SHA-256 (hex) of the open file, if its sampled pages are still what they
        were."""
        remembered = self._load(stamp)
        if remembered is None:
            return None
        for offset, expected in remembered.pages:
            if _page_digest(descriptor, offset) != expected:
                logger.warning(
                    "weights changed under an unchanged file stamp (inode %d): hashing again",
                    stamp.inode,
                )
                return None
        return remembered.sha256

    def remember(self, stamp: FileStamp, descriptor: int, sha256: str) -> None:
        pages = [
            [offset, _page_digest(descriptor, offset)]
            for offset in _sample_offsets(stamp.size_bytes, self._chance)
        ]
        content = json.dumps({"version": 1, "sha256": sha256, "pages": pages}).encode()
        path = self.folder / stamp.name()
        draft = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_ours():
                return
            draft.write_bytes(content)
            draft.replace(path)
        except OSError as error:
            logger.warning("cannot remember a weights digest in %s: %s", self.folder, error)

    def _is_ours(self) -> bool:
        status = self.folder.stat()
        ours = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not ours:
            logger.warning("%s may be written by others: not used", self.folder)
        return ours

    def _load(self, stamp: FileStamp) -> _Remembered | None:
        try:
            if not self.folder.is_dir() or not self._is_ours():
                return None
            fields = json.loads((self.folder / stamp.name()).read_bytes())
            if fields["version"] != 1:
                return None
            pages = tuple((int(offset), str(digest)) for offset, digest in fields["pages"])
            sha256 = str(fields["sha256"])
            if len(bytes.fromhex(sha256)) != hashlib.sha256().digest_size:
                return None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("ignoring a remembered weights digest: %s", error)
            return None
        return _Remembered(sha256, pages)


class WeightsDigest:
    """The revision of the weights in a folder (or of one file), found in the background.

    `source`: the model's folder, or one weight file. `configured_revision`: a revision that the
    operator vouches for (a commit, say); it is used as it is and nothing is read. The thread is a
    daemon thread: it never keeps the engine alive, and `close()` ends it within one chunk of 8 MiB.
    """

    def __init__(
        self,
        source: Path,
        *,
        configured_revision: str | None = None,
        memory: DigestMemory | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if configured_revision is not None and not configured_revision.strip():
            raise ValueError("configured_revision is empty: leave it out or name a revision")
        self._source = source
        self._memory = memory if memory is not None else DigestMemory()
        self._now_ns = now_ns
        self._on_progress = on_progress
        self._revision = configured_revision
        self._failure: WeightsError | None = None
        self._cancelled = threading.Event()
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        if configured_revision is not None:
            self._finished.set()

    def start(self) -> WeightsDigest:
        """Begins to hash; does nothing when the revision is known or the thread runs."""
        if self._thread is None and not self._finished.is_set():
            self._thread = threading.Thread(
                target=self._run, name="kvstore-weights-digest", daemon=True
            )
            self._thread.start()
        return self

    def result_if_ready(self) -> str | None:
        """The revision, or None while it is unknown. Never waits."""
        return self._revision

    @property
    def failure(self) -> WeightsError | None:
        """Why there will be no revision, or None."""
        return self._failure

    def wait(self, timeout_s: float) -> str | None:
        """Waits at most `timeout_s` seconds. For tools and tests: an engine asks
        `result_if_ready()`."""
        self._finished.wait(timeout_s)
        return self._revision

    def close(self) -> None:
        """Gives up a digest that is not ready, and waits for the thread to end."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._revision = files_digest(
                weight_files(self._source),
                memory=self._memory,
                now_ns=self._now_ns,
                on_progress=self._on_progress,
                cancelled=self._cancelled.is_set,
            )
        except WeightsError as error:
            self._failure = error
            logger.warning("the weights' revision stays unknown: %s", error)
        finally:
            self._finished.set()


def weight_files(source: Path) -> tuple[Path, ...]:
    """The files that decide what the weights are, sorted by name: configuration, custom code,
    weights, indexes.

    All formats that lie in the folder count, since which of them an engine loads is the engine's
    choice. Raises `WeightsError` if there is no weight file.
    """
    if source.is_file():
        return (source,)
    try:
        names = sorted(entry.name for entry in os.scandir(source) if entry.is_file())
    except OSError as error:
        raise WeightsError(f"cannot list {source}: {error}") from error
    if not any(name.endswith(WEIGHT_SUFFIXES) for name in names):
        raise WeightsError(
            f"no weight file ({', '.join(WEIGHT_SUFFIXES)}) in {source}: "
            "configure a weights revision"
        )
    return tuple(
        source / name
        for name in names
        if name.endswith((*WEIGHT_SUFFIXES, ".py", ".index.json")) or name in CONFIG_NAMES
    )


def files_digest(
    paths: Sequence[Path],
    *,
    memory: DigestMemory,
    now_ns: Callable[[], int] = time.time_ns,
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> str:
    """`"sha256:" + hex` over name, size and content of the files, in the order given.

    `on_progress(done_bytes, total_bytes)` is called after each chunk. Raises `WeightsError` if a
    file is unreadable or keeps changing, `DigestCancelledError` once `cancelled()` is true.
    """
    try:
        total = sum(path.stat().st_size for path in paths)
    except OSError as error:
        raise WeightsError(f"cannot read the weights: {error}") from error
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)
        if cancelled():
            raise DigestCancelledError("the weights digest was given up")

    whole = hashlib.sha256(_frame(b"kvstore/weights/1"))
    for path in paths:
        size, content = _file_digest(path, memory, now_ns, advance)
        whole.update(_frame(path.name.encode()) + struct.pack("<Q", size) + bytes.fromhex(content))
    return f"sha256:{whole.hexdigest()}"


def _file_digest(
    path: Path,
    memory: DigestMemory,
    now_ns: Callable[[], int],
    advance: Callable[[int], None],
) -> tuple[int, str]:
    for _ in range(READ_ATTEMPTS):
        try:
            with path.open("rb", buffering=0) as file:
                descriptor = file.fileno()
                before = FileStamp.of(os.fstat(descriptor))
                known = memory.recall(before, descriptor)
                if known is not None:
                    advance(before.size_bytes)
                    return before.size_bytes, known
                begun_ns = now_ns()
                content = _hash_whole(descriptor, before.size_bytes, advance)
                if FileStamp.of(os.fstat(descriptor)) != before:
                    continue
                if before.ctime_ns < begun_ns - SETTLED_NS:
                    memory.remember(before, descriptor, content)
                return before.size_bytes, content
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error}") from error
    raise WeightsError(f"{path} changed {READ_ATTEMPTS} times while it was read")


def _hash_whole(descriptor: int, size_bytes: int, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(size_bytes, 1))))
    offset = 0
    while count := os.preadv(descriptor, [buffer], offset):
        digest.update(buffer[:count])
        offset += count
        advance(count)
    return digest.hexdigest()


def _page_digest(descriptor: int, offset: int) -> str:
    return hashlib.sha256(os.pread(descriptor, PAGE_BYTES, offset)).hexdigest()


def _sample_offsets(size_bytes: int, chance: random.Random) -> list[int]:
    """Offsets of the first, the last and some random pages, ascending."""
    pages = max(1, -(-size_bytes // PAGE_BYTES))
    chosen = {0, pages - 1}
    chosen.update(chance.sample(range(pages), min(pages, SAMPLED_PAGES - 2)))
    return [page * PAGE_BYTES for page in sorted(chosen)]


def default_memory_folder() -> Path:
    """`$XDG_CACHE_HOME/kvstore/weights`, else `~/.cache/kvstore/weights`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "kvstore" / "weights"


def _frame(field: bytes) -> bytes:
    return struct.pack("<Q", len(field)) + field
