"""Becomes the user of a container of a pod and runs a command there, in namespaces of its own:

    unshare --mount --pid --ipc --fork python -m tests.deploy.as_container --uid 10001 \\
        --gid 10001 --groups 10001 --shared FOLDER [--at PATH] [--read-only] [--caps chown] COMMAND

Run as root. FOLDER is what the kubelet mounts into it, at the same path or at PATH. The user has no
capabilities but those given, which only user 0 can use, and gets no new privileges.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tests.e2e.namespaces import ROOT, arrange, mount


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uid", type=int, required=True)
    parser.add_argument("--gid", type=int, required=True)
    parser.add_argument("--groups", type=int, nargs="*", default=[])
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--at", type=Path)
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--caps", nargs="*", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    arrange(given.shared)
    at = given.at or given.shared
    if given.at:
        # Whatever the machine has there is covered.
        mount("-t", "tmpfs", "-o", "mode=755", "fresh", at.parent)
        at.mkdir()
    mount("--bind", given.shared, at)
    if given.read_only:
        mount("-o", "remount,bind,ro", at)
    bounding = ",".join(["-all", *(f"+{name}" for name in given.caps)])
    groups = ",".join(map(str, given.groups))
    os.environ["HOME"] = "/tmp"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.chdir(ROOT)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    os.execvp(
        "setpriv",
        [
            *("setpriv", f"--reuid={given.uid}", f"--regid={given.gid}"),
            *([f"--groups={groups}"] if groups else ["--clear-groups"]),
            *("--no-new-privs", f"--bounding-set={bounding}", f"--inh-caps={bounding}"),
            *command,
        ],
    )


if __name__ == "__main__":
    main()
