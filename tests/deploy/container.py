"""Runs an `Image` as a container engine would with the strictest of its options: namespaces of its
own, the root read-only, no capabilities, no new privileges, the user of the image, volumes.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.deploy.dockerfile import Image
from tests.deploy.rootfs import CannotBuild, mounts
from tests.e2e.stage import until

UNSHARE = ("unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child")
STOP_S = 30.0


class Container:
    """One process of an image. `volumes` maps paths inside to folders outside."""

    def __init__(
        self, image: Image, volumes: Mapping[str, Path], environ: Mapping[str, str], log: Path
    ) -> None:
        self._image = image
        self._environ = {**image.environ, **environ}
        self._log = log
        root = image.root
        script = [f"mount --bind {root} {root}", f"mount -o remount,bind,ro {root}"]
        script += mounts(root).splitlines()
        script += [
            "/sbin/ip link set lo up 2>/dev/null || true",
        ]
        for inside, outside in volumes.items():
            script.append(f"mount --bind -o nosuid,nodev {outside} {root}{inside}")
        command = shlex.join(self._as_user(image.start_with()))
        script.append(f"exec /usr/sbin/chroot {root} {command}")
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*UNSHARE, "/bin/sh", "-ec", "\n".join(script)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environ,
            )

    def _as_user(self, command: list[str]) -> list[str]:
        uid, gid = self._image.user.split(":")
        return [
            *("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"),
            *("--bounding-set=-all", "--inh-caps=-all"),
            *("/usr/bin/env", f"--chdir={self._image.workdir}", *command),
        ]

    @property
    def pid(self) -> int:
        """Of the image's process, as this machine counts; it is process 1 of the container."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (child,) = children.read_text().split()
        return int(child)

    def execute(self, command: list[str], *, as_root: bool = False) -> tuple[int, str]:
        """Runs one more process in it, as `docker exec` does: (exit code, what it wrote)."""
        entered = ["nsenter", f"--target={self.pid}", "--all", "--root", "--wd"]
        done = subprocess.run(
            [*entered, *(command if as_root else self._as_user(command))],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self._environ,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def healthy(self) -> bool:
        """What the image's own check says now."""
        return self.execute(self._image.healthcheck)[0] == 0

    def wait_healthy(self, deadline_s: float = 30.0) -> float:
        """Seconds until the check passes for the first time."""
        begin = time.monotonic()
        until("the container is healthy", self._checked, deadline_s)
        return time.monotonic() - begin

    def _checked(self) -> bool:
        if self.process.poll() is not None:
            raise CannotBuild(f"ended with {self.process.returncode}:\n{self.log()}")
        return self._started() and self.healthy()

    def _started(self) -> bool:
        """Before that there is no root to enter."""
        try:
            return "python" in os.readlink(f"/proc/{self.pid}/exe")
        except (OSError, ValueError):
            return False

    def status(self, name: str) -> str:
        """A line of the process's /proc/PID/status."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.split(":", 1)[1].strip()
        raise KeyError(name)

    def stop(self) -> int:
        """As `docker stop`: the image's signal to process 1, then its exit code."""
        os.kill(self.pid, signal.Signals[self._image.stop_signal])
        return self.process.wait(STOP_S)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its child goes with it
        self.process.wait(STOP_S)
