"""Roots to run an image's steps in: a clean Debian by debootstrap, layers above it by overlayfs.

Linux, as root, in a mount namespace of the caller's own: nothing here is unmounted one by one. The
base is kept for a week under $XDG_CACHE_HOME, since making it takes most of the time. What a build
needs of this machine (package mirrors, certificates) is lent to it while it runs, in HOST_FILES,
and is in no root afterwards.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

SUITE = "bookworm"
KEEP_S = 7 * 86_400.0
HOST_FILES = "run/of-the-host"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


class CannotBuild(Exception):
    """This machine lacks something, or a step failed."""


def run(*arguments: object, env: dict[str, str] | None = None) -> None:
    """Raises CannotBuild with the end of what the command wrote if it fails."""
    command = list(map(str, arguments))
    done = subprocess.run(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        said = done.stdout.decode(errors="replace")[-4000:]
        raise CannotBuild(f"exit code {done.returncode} of {' '.join(command)[:300]}:\n{said}")


def base_root() -> Path:
    """A minimal Debian that nobody has touched; made if there is none that is young enough."""
    if shutil.which("debootstrap") is None:
        raise CannotBuild("debootstrap is not installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore-tests"
    root = cache / f"{SUITE}-minbase"
    with_stamp = root / "etc/debian_version"
    if with_stamp.exists() and time.time() - root.stat().st_mtime < KEEP_S:
        return root
    cache.mkdir(parents=True, exist_ok=True)
    fresh = Path(f"{root}.{os.getpid()}")
    arguments = ["--variant=minbase", SUITE, str(fresh / "made"), *mirror()]
    in_memory(fresh)
    with (cache / "debootstrap.log").open("wb") as log:
        made = subprocess.run(["debootstrap", *arguments], stdout=log, stderr=log, check=False)
    if made.returncode != 0:
        raise CannotBuild(f"debootstrap failed:\n{Path(log.name).read_text()[-2000:]}")
    shutil.rmtree(fresh / "made/var/cache/apt/archives", ignore_errors=True)
    (fresh / "made/var/cache/apt/archives/partial").mkdir(parents=True)
    shutil.rmtree(root, ignore_errors=True)
    draft = Path(f"{root}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    run("cp", "-a", fresh / "made", draft)
    os.utime(draft)
    draft.rename(root)
    run("umount", fresh)
    fresh.rmdir()
    return root


def in_memory(folder: Path) -> None:
    """Makes a folder whose files are never synced: dpkg does so for each, and it is thrown away."""
    folder.mkdir(parents=True, exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", "size=3g,mode=755", "tmpfs", folder)


def debian_sources() -> str:
    """What this machine's apt takes Debian's own packages from; "" if it is another release."""
    if f"VERSION_CODENAME={SUITE}" not in Path("/etc/os-release").read_text():
        return ""
    files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("debian.sources")]
    return "\n".join(file.read_text() for file in files if file.exists())


def mirror() -> list[str]:
    """Where debootstrap finds the suite, if this machine says so."""
    found = re.search(
        r"(?m)^(?:URIs:|deb(?: \[[^\]]*\])?) +(\S+/debian/?)(?=\s|$)", debian_sources()
    )
    return [found[1]] if found else []


class Layer:
    """A root that starts as another one and keeps what is written to it to itself."""

    def __init__(self, folder: Path, below: Path) -> None:
        """`below` is a root that does not change any more."""
        self.root = folder / "root"
        for name in ("root", "upper", "work"):
            (folder / name).mkdir(parents=True)
        lower = f"lowerdir={below},upperdir={folder / 'upper'},workdir={folder / 'work'}"
        run("mount", "-t", "overlay", "-o", lower, "overlay", self.root)

    def run(self, command: list[str], environ: dict[str, str], folder: str) -> None:
        """Runs a build step in it, as root, with the network and mirrors of this machine."""
        script = (
            mounts(self.root)
            + lend(self.root)
            + f'cd "$0" && exec chroot {self.root} /bin/sh -c \'cd "$0" && exec "$@"\' "$@"'
        )
        run(
            *("unshare", "--mount", "--pid", "--ipc", "--fork", "/bin/sh", "-ec", script),
            *(self.root, folder, *command),
            env={**lent_environ(), **environ},
        )

    def close(self) -> None:
        """What the next layer stands on has to be at rest."""
        shutil.rmtree(self.root / HOST_FILES, ignore_errors=True)


def mounts(root: Path) -> str:
    """Shell lines that give a root the file systems a container has."""
    lines = [
        f"mount -t proc proc {root}/proc",
        f"mount --rbind -o ro /sys {root}/sys",
        f"mount -t tmpfs -o mode=755,nosuid tmpfs {root}/dev",
        f"mkdir {root}/dev/shm {root}/dev/pts",
        f"mount -t tmpfs -o mode=1777,nosuid,nodev,noexec,size=64m tmpfs {root}/dev/shm",
    ]
    for name in DEVICES:
        lines += [f": >{root}/dev/{name}", f"mount --bind /dev/{name} {root}/dev/{name}"]
    return "\n".join(lines) + "\n"


def lend(root: Path) -> str:
    """Shell lines that show a root this machine's mirrors, for as long as the command runs."""
    folder = root / HOST_FILES
    lines = [
        f"mkdir -p {folder}",
        f"mount -t tmpfs tmpfs {folder}",
        f"mkdir {folder}/parts",
        f'printf %s "$APT_SOURCES" >{folder}/parts/debian.sources',
        f'printf %s "$APT_CONF" >{folder}/apt.conf',
        "unset APT_SOURCES APT_CONF",
    ]
    if CERTIFICATES.exists():
        lines.append(f"cp {CERTIFICATES} {folder}/ca.crt")
    for name in ("resolv.conf", "hosts"):
        lines.append(f"[ ! -e {root}/etc/{name} ] || mount --bind /etc/{name} {root}/etc/{name}")
    return "\n".join(lines) + "\n"


def lent_environ() -> dict[str, str]:
    """Where apt and pip look while a step runs."""
    environ = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    environ["DEBIAN_FRONTEND"] = "noninteractive"
    environ["APT_SOURCES"] = sources = debian_sources()
    conf = [file.read_text() for file in sorted(Path("/etc/apt/apt.conf.d").glob("99*"))]
    if sources.startswith("Types:") or "\nTypes:" in sources:
        conf.append(
            f'Dir::Etc::sourcelist "/dev/null";\nDir::Etc::sourceparts "/{HOST_FILES}/parts";'
        )
    environ["APT_CONF"] = "\n".join([*conf, 'Acquire::Languages "none";', 'Acquire::Retries "3";'])
    environ["APT_CONFIG"] = f"/{HOST_FILES}/apt.conf"
    if CERTIFICATES.exists():
        environ["PIP_CERT"] = f"/{HOST_FILES}/ca.crt"
    for name in ("PIP_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT"):
        if name in os.environ:
            environ[name] = os.environ[name]
    return environ
