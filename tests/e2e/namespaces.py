"""Becomes another user in namespaces of its own, as a container would, and runs a command there:

    unshare --mount --pid --ipc --fork python tests/e2e/namespaces.py UID GID SHARED COMMAND...

Run as root, by path. /tmp and /dev/shm are fresh there but for the folder SHARED; what only root
may reach (the interpreter, this checkout) is put where that user can read it, under the same path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STASH = Path("/mnt")
HIDDEN = (Path("/tmp"), Path("/dev/shm"))


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def passable(path: Path) -> bool:
    return path == Path("/") or bool(path.stat().st_mode & 0o001)


def needed(shared: Path) -> list[Path]:
    """Folders that the command needs, each once, none within another."""
    folders = {ROOT, Path(sys.prefix), Path(sys.base_prefix), shared}
    return sorted(f for f in folders if not any(f != g and f.is_relative_to(g) for g in folders))


def cover(folder: Path) -> Path | None:
    """The topmost folder above `folder` that has to be covered to make it reachable."""
    for parent in reversed(folder.parents):
        if parent in HIDDEN or not passable(parent):
            return parent
    return None


def arrange(shared: Path) -> None:
    covered = {folder: cover(folder) for folder in needed(shared)}  # while all can be seen
    mount("--make-rprivate", "/")
    mount("-t", "proc", "proc", "/proc")
    mount("-t", "tmpfs", "-o", "mode=755", "stash", STASH)
    stashed = {folder: STASH / str(number) for number, folder in enumerate(covered)}
    for folder, place in stashed.items():
        place.mkdir()
        mount("--bind", folder, place)
    for hidden in sorted({*HIDDEN, *(path for path in covered.values() if path is not None)}):
        mode = "1777" if hidden in HIDDEN else "755"
        mount("-t", "tmpfs", "-o", f"mode={mode}", "fresh", hidden)
    for folder, place in stashed.items():
        if covered[folder] is not None:
            folder.mkdir(parents=True, exist_ok=True)
            mount("--bind", place, folder)


def main() -> None:
    uid, gid, shared, *command = sys.argv[1:]
    arrange(Path(shared))
    become = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
    os.environ["HOME"] = "/tmp"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.chdir(ROOT)
    os.execvp(become[0], [*become, *command])


if __name__ == "__main__":
    main()
