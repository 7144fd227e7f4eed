"""Builds the image's root by the Dockerfile's own steps and shows that the daemon serves there.

    python -m tests.deploy.run_dockerfile

No container engine is needed, but root, debootstrap, and the mirrors that this machine uses. What
runs is what would run: the final user, a read-only root, no capabilities, an engine in another
container as another user. Exit code 0 if everything held, 1 if not, 2 if it could not be tried.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.deploy.container import Container
from tests.deploy.dockerfile import Build, Image, checkout
from tests.deploy.rootfs import CannotBuild, base_root, in_memory
from tests.e2e.stage import Child, until

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = ROOT / "deploy/docker/Dockerfile"
NAMESPACES = ROOT / "tests/e2e/namespaces.py"
ENGINE_UID = 64_001
INSIDE = "--inside"
BUILD_TOOLS = ("gcc", "cc", "c++", "clang", "ld", "as", "make", "pip", "pip3", "cmake")
SETTINGS = {
    "KVSTORE_HOST__CAPACITY_BYTES": "64MiB",
    "KVSTORE_DISK__PATH": "/var/lib/kvstore/disk",
    "KVSTORE_DISK__CAPACITY_BYTES": "256MiB",
    "KVSTORE_TENANTS__DEFAULT__MODE": "0660",
}


class Wrong(AssertionError):
    """Something that was promised does not hold."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)
    print(f"   ok: {what}", flush=True)


def look_into(image: Image) -> None:
    """What the final root must not hold, and how it is set up."""
    uid, gid = image.user.split(":")
    check(int(uid) > 0 and int(gid) > 0, f"the final user is {image.user}")
    folders = [image.root / name for name in ("usr/bin", "usr/local/bin", "opt/kvstore/bin")]
    found = [str(f / tool) for f in folders for tool in BUILD_TOOLS if (f / tool).exists()]
    check(not found, f"no compiler and no installer in the final stage {found or ''}")
    check(not (image.root / "src").exists(), "no sources in the final stage")
    used = subprocess.run(
        ["du", "-sm", image.root], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    print(f"   the final root holds {used} MiB")
    check(image.start_with()[0] == "kvstored", "the daemon itself gets the signals")
    ours = image.root / "opt/kvstore"
    writable = [p for p in ours.rglob("*") if not p.is_symlink() and p.lstat().st_mode & 0o022]
    check(not writable and ours.lstat().st_uid == 0, "its own user cannot change the program")


def serve(image: Image, folder: Path) -> None:
    """Two lives of a container on the same volumes."""
    uid, gid = (int(number) for number in image.user.split(":"))
    volumes = {path: folder / path.strip("/").replace("/", "-") for path in image.volumes}
    check(set(volumes) == {"/run/kvstore", "/var/lib/kvstore"}, "volumes: sockets and state")
    for path, outside in volumes.items():
        # As an engine makes a named volume: with the owner and mode of what is in the image there.
        inside = (image.root / path.strip("/")).stat()
        check((inside.st_uid, inside.st_gid) == (uid, gid), f"{path} belongs to the daemon")
        outside.mkdir()
        os.chown(outside, inside.st_uid, inside.st_gid)
        outside.chmod(inside.st_mode & 0o7777)
    folder.chmod(0o755)
    log = folder / "log"
    socket = str(volumes["/run/kvstore"] / "data.sock")
    with started(image, volumes, log) as container:
        print(f"   healthy after {container.wait_healthy():.2f} s")
        look_at(container, uid)
        begin = time.monotonic()
        check(container.healthy(), "the health check passes")
        print(f"   it takes {time.monotonic() - begin:.2f} s")
        put = roundtrip(socket, "put", gid)
        check(
            (put["stored"], put["kind"]) == (16, "shm") and bool(put["mapped"]),
            f"an engine's user {ENGINE_UID} from outside stores 16 blocks through shared memory",
        )
        got = roundtrip(socket, "get", gid)
        check(got["right"] == 16, "and gets the same bytes")
        os.kill(container.pid, signal.SIGSTOP)
        check(not container.healthy(), "the health check fails while nothing answers")
        os.kill(container.pid, signal.SIGCONT)
        check(container.stop() == 0, "SIGTERM drains it: exit code 0")
        check('"event": "stopped"' in container.log(), "it said so")
        check(not Path(socket).exists(), "its sockets are gone")
    with started(image, volumes, log) as container:
        container.wait_healthy()
        # The index is loaded beside the serving.
        until("all blocks are there", lambda: roundtrip(socket, "get", gid)["right"] == 16, 30)
        check(True, "a new container on the same volumes has the blocks")
        check(container.stop() == 0, "SIGTERM drains it again")


def look_at(container: Container, uid: int) -> None:
    """What the kernel says about the process."""
    check(container.status("Uid").split() == [str(uid)] * 4, f"it runs as {uid}")
    caps = [container.status(name) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")]
    check(all(int(one, 16) == 0 for one in caps), "it has no capability, and can get none")
    check(container.status("NoNewPrivs") == "1", "nor new privileges")
    for path in ("/x", "/opt/kvstore/x", "/etc/x", "/usr/bin/x"):
        code, said = container.execute(["/usr/bin/touch", path], as_root=True)
        check(code != 0 and "Read-only" in said, f"even root cannot write {path}")
    code, _ = container.execute(["/usr/bin/touch", "/run/kvstore/x"])
    container.execute(["/usr/bin/rm", "/run/kvstore/x"])
    check(code == 0, "/run/kvstore can be written to")


def roundtrip(socket: str, verb: str, gid: int) -> dict[str, object]:
    """An engine in a container of its own, as another user of the daemon's group."""
    unshare = ("unshare", "--mount", "--pid", "--ipc", "--net", "--fork")
    become = (sys.executable, str(NAMESPACES), str(ENGINE_UID), str(gid), str(Path(socket).parent))
    with Child("sdk_roundtrip", socket, verb, 7, prefix=(*unshare, *become)) as child:
        return child.hear(60)


@contextmanager
def started(image: Image, volumes: dict[str, Path], log: Path) -> Iterator[Container]:
    container = Container(image, volumes, SETTINGS, log)
    try:
        yield container
    except BaseException:
        sys.stderr.write(container.log())
        raise
    finally:
        container.kill()


def inside(folder: Path) -> None:
    """In a mount namespace of our own."""
    times: dict[str, float] = {}

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        print(f"== {what}", flush=True)
        begin = time.monotonic()
        yield
        times[what] = round(time.monotonic() - begin, 1)

    with timed("a clean Debian"):
        base = base_root()
    with timed("the Dockerfile's steps"):
        context = folder / "context"
        context.mkdir()
        checkout(ROOT, context)
        in_memory(folder / "stages")
        image = Build(context, base, folder / "stages").run(FILE)
    with timed("the final root"):
        look_into(image)
    with timed("a container of it"):
        serve(image, folder)
    print(f"everything held; seconds: {json.dumps(times)}")


def main() -> int:
    try:
        if sys.argv[1:2] == [INSIDE]:
            inside(Path(sys.argv[2]))
            return 0
        if os.geteuid() != 0:
            raise CannotBuild("only root can make namespaces and mounts")
    except CannotBuild as error:
        print(f"cannot be tried: {error}", file=sys.stderr)
        return 2
    except AssertionError as error:
        print(f"WRONG: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="kvstore-image-", dir="/var/tmp") as folder:
        command = [sys.executable, "-m", "tests.deploy.run_dockerfile", INSIDE, folder]
        # With the first process of its namespace everything that it has started ends.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        namespaces = ("unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child")
        return subprocess.run([*namespaces, *command], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
