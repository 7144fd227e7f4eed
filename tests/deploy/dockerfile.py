"""Executes a Dockerfile's steps without a container engine: each stage is a layer above Debian.

Knows the instructions that ours has and refuses all others, so that nothing is left out silently.
`Image` is what an engine would run.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

from tests.deploy.rootfs import CannotBuild, Layer, run

BASE = "debian:bookworm-slim"


@dataclass
class Image:
    """A root and how to start it."""

    layer: Layer
    environ: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    health_flags: dict[str, str] = field(default_factory=dict)
    volumes: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"

    @property
    def root(self) -> Path:
        return self.layer.root

    def start_with(self) -> list[str]:
        """The whole command line."""
        return [*self.entrypoint, *self.command]


def steps(file: Path) -> list[tuple[str, str]]:
    """(instruction, value) in order, with lines joined."""
    parser = DockerfileParser(path=str(file), cache_content=True)
    return [
        (str(one["instruction"]), str(one["value"]))
        for one in parser.structure
        if one["instruction"] != "COMMENT"
    ]


class Build:
    """Runs the steps of one file."""

    def __init__(self, context: Path, base: Path, folder: Path) -> None:
        self._context = context
        self._base = base
        self._folder = folder
        self._stages: dict[str, Image] = {}
        self._made: list[Image] = []
        self._image: Image | None = None

    def run(self, file: Path) -> Image:
        """The last stage."""
        for instruction, value in steps(file):
            print(f"   {instruction} {' '.join(value.split())[:110]}", flush=True)
            do = getattr(self, f"_{instruction.lower()}", None)
            if do is None:
                raise CannotBuild(f"{instruction} is not known here: add it to this script")
            begin = time.monotonic()
            do(value)
            if instruction in ("RUN", "COPY"):
                print(f"      {time.monotonic() - begin:.1f} s", flush=True)
        if self._image is None:
            raise CannotBuild(f"{file} has no stage")
        self._image.layer.close()
        return self._image

    @property
    def _now(self) -> Image:
        if self._image is None:
            raise CannotBuild("the first instruction has to be FROM")
        return self._image

    def _from(self, value: str) -> None:
        name, *more = value.split()
        if self._image is not None:
            self._image.layer.close()
        earlier = self._stages.get(name)
        if earlier is None and name != BASE:
            raise CannotBuild(f"FROM {name}: only {BASE} and earlier stages can be had")
        number = str(len(self._made))
        below = self._base if earlier is None else earlier.root
        self._image = Image(Layer(self._folder / number, below))
        if earlier is not None:
            self._image.environ.update(earlier.environ)
        self._made.append(self._image)
        if more:
            self._stages[more[1]] = self._image

    def _run(self, value: str) -> None:
        image = self._now
        if image.user != "0:0":
            raise CannotBuild("RUN after USER is not known here")
        image.layer.run(["/bin/sh", "-c", value], image.environ, image.workdir)

    def _env(self, value: str) -> None:
        for pair in shlex.split(plain(value)):
            name, _, text = pair.partition("=")
            self._now.environ[name] = text

    def _workdir(self, value: str) -> None:
        self._now.workdir = plain(value)
        (self._now.root / plain(value).lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _copy(self, value: str) -> None:
        image = self._now
        given = shlex.split(plain(value))
        source_root = self._context
        if given[0].startswith("--from="):
            source_root = self._stages[given.pop(0).removeprefix("--from=")].root
        if given[0].startswith("--"):
            raise CannotBuild(f"COPY {given[0]} is not known here")
        *sources, target = given
        into = image.root / (Path(image.workdir) / target).as_posix().lstrip("/")
        for source in sources:
            path = source_root / source.lstrip("/")
            if path.is_dir():
                into.mkdir(parents=True, exist_ok=True)
                run("cp", "-rT", "--preserve=mode,links,timestamps", path, into)
            else:
                place = into / path.name if target.endswith("/") else into
                place.parent.mkdir(parents=True, exist_ok=True)
                run("cp", "--preserve=mode,timestamps", path, place)

    def _user(self, value: str) -> None:
        self._now.user = plain(value)

    def _volume(self, value: str) -> None:
        self._now.volumes += words(value)

    def _stopsignal(self, value: str) -> None:
        self._now.stop_signal = value

    def _entrypoint(self, value: str) -> None:
        self._now.entrypoint = listed(value)

    def _cmd(self, value: str) -> None:
        self._now.command = listed(value)

    def _healthcheck(self, value: str) -> None:
        flags, _, command = value.partition("CMD")
        for flag in flags.split():
            name, _, text = flag.removeprefix("--").partition("=")
            self._now.health_flags[name] = text
        self._now.healthcheck = listed(command.strip())


def plain(value: str) -> str:
    """A value without variables."""
    if "$" in value:
        raise CannotBuild(f"variables are not known here: {value}")
    return value.strip()


def words(value: str) -> list[str]:
    """Of a list in JSON or in words."""
    return listed(value) if value.startswith("[") else value.split()


def listed(value: str) -> list[str]:
    """The exec form. The shell form would put a shell where signals should go."""
    try:
        found = json.loads(value)
    except json.JSONDecodeError:
        raise CannotBuild(f'only the form ["command", ...] is taken: {value}') from None
    return [str(one) for one in found]


def checkout(folder: Path, into: Path) -> None:
    """What git knows or would take of a working tree: the context of a build in a clean clone."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=folder,
        capture_output=True,
        check=True,
    )
    names = [name for name in listing.stdout.decode().split("\0") if name]
    for name in names:
        if (folder / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).write_bytes((folder / name).read_bytes())
