"""A file system that fails when it is told to: a folder seen through FUSE, served by a process of
its own.

    if reason := missing(): ...skip...
    with FaultFs(tmp_path / "device") as device:
        start_daemon(..., disk__path=str(device.path / "disk"))
        device.set(Fault(("read",), SEGMENTS, error="EIO"))
        ...
        struck = device.clear()

`device.backing` is the folder behind it, for damage at rest. Whoever ends a test ends the daemon
before the file system.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from tests.daemon import _python_path
from tests.faults import Fault, Rules, pack, unpack

MOUNT_S = 10.0
ANSWER_S = 20.0
THREADS_MAX = 64
"""Calls that may hang at one time."""
_ANY_NUMBER_OF_THREADS_UNTIL = (3, 12)


def missing() -> str:
    """Why there is no such file system on this machine; empty if there is."""
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    try:
        importlib.import_module("mfusepy")
    except (OSError, AttributeError, ImportError):
        return "there is no libfuse (apt-get install fuse3 libfuse3-3)"
    return ""


class FaultFs:
    """See the module's docstring."""

    def __init__(
        self, folder: Path, *, seed: int = 0, fallocate: bool = True, direct: bool = True
    ) -> None:
        """folder: made, holds the backing folder and the mount point. fallocate, direct: whether
        the file system has them.
        """
        self.backing = folder / "backing"
        self.path = folder / "mount"
        self._options = {"seed": seed, "fallocate": fallocate, "direct": direct}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> FaultFs:
        """Raises AssertionError if it cannot be mounted."""
        self.backing.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=True)
        argv = [sys.executable, "-m", "tests.faultfs", str(self.backing), str(self.path)]
        self._process = subprocess.Popen(
            [*argv, json.dumps(self._options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": _python_path(os.environ)},
        )
        self.clear()
        return self

    def set(self, *faults: Fault) -> Counter[str]:
        """From now on it fails like that, and in no other way. How often the rules until now have
        struck.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pack(faults) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"the file system ended with {process.wait(MOUNT_S)}"
        return Counter(json.loads(line))

    def clear(self) -> Counter[str]:
        """It works again; what hung goes on."""
        return self.set()

    def close(self) -> None:
        """Unmounts it, and ends its process. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        unmount(self.path)
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(MOUNT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def __enter__(self) -> FaultFs:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def unmount(path: Path) -> None:
    """With what this user may use: only root has the last one."""
    for command in (["fusermount3", "-u", "-z"], ["fusermount", "-u", "-z"], ["umount", "-l"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, str(path)], capture_output=True, check=False)
            if done.returncode == 0:
                return


# ---------------------------------------------------------------- the serving process


class _Passing:
    """The folder, call by call: what mfusepy expects of its operations."""

    use_ns = True

    def __init__(self, root: str, rules: Rules, *, direct: bool) -> None:
        self._root = root
        self._rules = rules
        self._direct = direct
        self.mounted = threading.Event()

    def init_with_config(self, conn_info: Any, config_3: Any) -> None:
        # Else twelve hanging reads make all others wait, which a real device's queue would not.
        conn_info.max_background = conn_info.congestion_threshold = THREADS_MAX
        self.mounted.set()

    def _of(self, path: str) -> str:
        return self._root + path

    def _look(self, path: str) -> str:
        self._rules.check("look", path)
        return self._root + path

    def _grow(self, path: str) -> str:
        self._rules.check("grow", path)
        return self._root + path

    # ---- names

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        stat = os.lstat(self._look(path)) if fh is None else os.fstat(fh)
        names = ("mode", "nlink", "size", "uid", "gid", "ino", "blocks", "blksize")
        times = {f"st_{name}time": getattr(stat, f"st_{name}time_ns") for name in "amc"}
        return {**{f"st_{name}": getattr(stat, f"st_{name}") for name in names}, **times}

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, Any], int]]:
        entries = [(".", os.lstat(self._look(path))), ("..", os.lstat(self._root))]
        with os.scandir(self._of(path)) as found:
            entries += [(entry.name, entry.stat(follow_symlinks=False)) for entry in found]
        return [
            (name, {"st_mode": stat.st_mode, "st_ino": stat.st_ino}, 0) for name, stat in entries
        ]

    def readlink(self, path: str) -> str:
        return os.readlink(self._of(path))

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._grow(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._of(path))
        return 0

    def unlink(self, path: str) -> int:
        self._rules.check("unlink", path)
        os.unlink(self._of(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        self._rules.check("write", new)
        os.rename(self._of(old), self._of(new))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._of(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._of(path), uid, gid)
        return 0

    def utimens(self, path: str, times: tuple[int, int]) -> int:
        os.utime(self._of(path), ns=times)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        stat = os.statvfs(self._look(path))
        names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files")
        return {name: getattr(stat, name) for name in (*names, "f_flag", "f_frsize", "f_namemax")}

    # ---- files

    def _checked(self, flags: int) -> int:
        if flags & os.O_DIRECT and not self._direct:
            raise OSError(errno.EINVAL, "no direct I/O")
        return flags & ~(os.O_DIRECT | os.O_APPEND | os.O_CREAT | os.O_EXCL)

    def open(self, path: str, flags: int) -> int:
        self._rules.check("open", path)
        return os.open(self._of(path), self._checked(flags))

    def create(self, path: str, mode: int, fi: int | None = None) -> int:
        return os.open(self._grow(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return self._rules.read(path, size, lambda length: os.pread(fh, length, offset))

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return self._rules.write(path, data, lambda part: os.pwrite(fh, part, offset))

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._rules.check("write", path)
        if fh is None:
            os.truncate(self._of(path), length)
        else:
            os.ftruncate(fh, length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._rules.check("sync", path)
        return 0  # nobody cuts this machine's power

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._rules.check("sync", path)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


class _Preallocating(_Passing):
    """One that can preallocate."""

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        self._rules.check("grow", path)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "only to make room")
        os.posix_fallocate(fh, offset, size)
        return 0


def _obey(rules: Rules, mounted: threading.Event) -> None:
    """Sets what each line of standard input says; ends the process with it."""
    mounted.wait(MOUNT_S)
    for line in sys.stdin:
        struck = dict(rules.struck)
        rules.struck.clear()
        rules.set(unpack(line))
        sys.stdout.write(json.dumps(struck) + "\n")
        sys.stdout.flush()
    rules.set([])


def main(backing: str, mount_point: str, options: dict[str, Any]) -> None:
    mfusepy = importlib.import_module("mfusepy")
    # A parent that is killed leaves no file system behind whose calls nobody answers.
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
    rules = Rules(options["seed"])
    kind = _Preallocating if options["fallocate"] else _Passing
    served = type(kind.__name__, (kind, mfusepy.Operations), {})
    operations = served(backing, rules, direct=options["direct"])
    threading.Thread(target=_obey, args=(rules, operations.mounted), daemon=True).start()
    more: dict[str, Any] = {}
    version = (mfusepy.fuse_version_major, mfusepy.fuse_version_minor)
    if version >= _ANY_NUMBER_OF_THREADS_UNTIL:
        more = {"max_threads": THREADS_MAX, "max_idle_threads": 10}
    mfusepy.FUSE(
        operations,
        mount_point,
        foreground=True,
        fsname="kvstore-faults",
        use_ino=True,
        attr_timeout=0,
        entry_timeout=0,
        **more,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
