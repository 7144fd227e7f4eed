"""How much memory there is to be had: the machine's, and what every cgroup above us allows.

Asked before memory is made. Shared memory that does not fit ends in the OOM killer or, where the
kernel does not overcommit, in SIGBUS; neither can be caught, and allocating to see if it fails
tells nothing inside a cgroup. Memory that clients of a dead daemon still have mapped counts as
used, so a restart may find less and `regrant` more later.

Pure but for `read_text`, which is passed in: a test gives a dictionary.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvstore.model.reasons import Reason, StartError

ReadText = Callable[[str], "str | None"]

MIB = 1 << 20
OVERHEAD_BYTES = 256 * MIB
"""For the daemon itself: interpreter and libraries, index, messages in flight."""
MINIMUM_BYTES = 64 * MIB
"""With less than this a smaller start is refused: it would hold a handful of blocks."""

LOOKS = 300
"""So often the groups that were found are used, by who asks again and again: five minutes of looks
a second. Groups of a process hardly ever change, and the mounts of a machine may be thousands."""

_SETTING = "host.capacity_bytes"
# Version 1 says "no limit" with the largest multiple of the page size below 2^63.
_UNLIMITED = 1 << 60
_CAP_IPC_LOCK = 14


def read_text(path: str) -> str | None:
    """The file's text; None if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def memlock_bytes() -> int | None:
    """RLIMIT_MEMLOCK; None if unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


class Limit(NamedTuple):
    """One bound on memory. `source` names it for a person; `total_bytes` is the bound itself."""

    source: str
    total_bytes: int
    available_bytes: int


class Grant(NamedTuple):
    """Bytes that may be used. `reason`: why that is less than was asked for, else empty."""

    granted_bytes: int
    reason: str


class Groups:
    """Where the groups of this process and those above them are, for who asks every second: looked
    up at first, and again after `LOOKS`.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, tuple[str, ...]]] = {}

    def folders(self, read: ReadText, kind: str, controller: str) -> tuple[str, ...]:
        """Of the hierarchy of `controller`, in file systems of this kind; the process's first."""
        looks, found = self._found.get(kind, (LOOKS, ()))
        if looks >= LOOKS:
            looks, found = 0, tuple(_folders(read, kind, _own_path(read, controller)))
        self._found[kind] = looks + 1, found
        return found


def limits(read: ReadText = read_text, groups: Groups | None = None) -> list[Limit]:
    """Every bound that applies to this process, in no order. Empty if /proc cannot be read."""
    groups = groups or Groups()
    return [*_machine(read), *_cgroup_v2(read, groups), *_cgroup_v1(read, groups)]


def tightest(read: ReadText = read_text, groups: Groups | None = None) -> Limit | None:
    """The bound with the fewest available bytes; None if none is known."""
    return min(limits(read, groups), key=lambda limit: limit.available_bytes, default=None)


def total_bytes(read: ReadText = read_text) -> int | None:
    """What this process could use if it were alone: of the machine or of its cgroup."""
    return min((limit.total_bytes for limit in limits(read)), default=None)


def check(
    need_bytes: int,
    *,
    allow_smaller: bool,
    overhead_bytes: int = OVERHEAD_BYTES,
    minimum_bytes: int = MINIMUM_BYTES,
    read: ReadText = read_text,
) -> Grant:
    """Grants `need_bytes` of host memory, or, if `allow_smaller`, what there is.

    A smaller grant is a multiple of 1 MiB and at least `minimum_bytes`. Raises StartError naming
    `host.capacity_bytes`, the MiB needed and the MiB available.
    """
    limit = tightest(read)
    if limit is None or need_bytes + overhead_bytes <= limit.available_bytes:
        return Grant(need_bytes, "")
    fits_bytes = max(limit.available_bytes - overhead_bytes, 0) // MIB * MIB
    detail = (
        f"{_mib(need_bytes)} MiB of blocks and {_mib(overhead_bytes)} MiB for the daemon itself "
        f"are needed, but {limit.available_bytes // MIB} MiB are available ({limit.source})"
    )
    if allow_smaller and fits_bytes >= min(minimum_bytes, need_bytes):
        return Grant(fits_bytes, f"{detail}; starting with {fits_bytes // MIB} MiB")
    if fits_bytes >= minimum_bytes:
        advice = f"; at most {fits_bytes // MIB} MiB fit, or set host.allow_smaller"
    else:
        advice = "; raise the memory limit, or end what uses the memory"
    raise StartError(
        Reason.START_MEMORY,
        f"{detail}{advice}. Clients of an earlier daemon may still hold its memory.",
        _SETTING,
    )


def regrant(
    wanted_bytes: int,
    granted_bytes: int,
    touched_bytes: int,
    available_bytes: int,
    *,
    overhead_bytes: int = OVERHEAD_BYTES,
) -> int:
    """How many bytes more can be had now, a multiple of 1 MiB; 0 if none or if nothing is wanted.

    `touched_bytes` of the grant are faulted in already, hence no longer in `available_bytes` (of
    `tightest`); the rest of the grant is still to come out of it.
    """
    missing_bytes = wanted_bytes - granted_bytes
    spare_bytes = available_bytes - overhead_bytes - max(granted_bytes - touched_bytes, 0)
    more_bytes = min(missing_bytes, spare_bytes)
    if more_bytes == missing_bytes:
        return max(more_bytes, 0)
    return max(more_bytes, 0) // MIB * MIB


def why_not_lockable(need_bytes: int, allowed_bytes: int | None, read: ReadText = read_text) -> str:
    """Empty if this process may lock `need_bytes`, else why not. `allowed_bytes`: RLIMIT_MEMLOCK,
    None if unlimited.
    """
    if allowed_bytes is None or allowed_bytes >= need_bytes:
        return ""
    match = re.search(r"(?m)^CapEff:\s*([0-9a-f]+)", read("/proc/self/status") or "")
    if match is not None and int(match.group(1), 16) >> _CAP_IPC_LOCK & 1:
        return ""
    return (
        f"RLIMIT_MEMLOCK is {allowed_bytes // 1024} KiB, {_mib(need_bytes)} MiB are needed, and "
        "the process lacks CAP_IPC_LOCK"
    )


def _mib(size_bytes: int) -> int:
    return -(-size_bytes // MIB)


# ---------------------------------------------------------------- the machine


def _machine(read: ReadText) -> Iterator[Limit]:
    fields = {
        name: int(kib) * 1024
        for name, kib in re.findall(r"(?m)^(\w+):\s+(\d+) kB", read("/proc/meminfo") or "")
    }
    if "MemTotal" in fields and "MemAvailable" in fields:
        yield Limit("MemAvailable of the machine", fields["MemTotal"], fields["MemAvailable"])
    strict = (read("/proc/sys/vm/overcommit_memory") or "").strip() == "2"
    if strict and "CommitLimit" in fields and "Committed_AS" in fields:
        yield Limit(
            "CommitLimit of the machine, which does not overcommit",
            fields["CommitLimit"],
            max(fields["CommitLimit"] - fields["Committed_AS"], 0),
        )


# ---------------------------------------------------------------- cgroups


def _cgroup_v2(read: ReadText, groups: Groups) -> Iterator[Limit]:
    for folder in groups.folders(read, "cgroup2", ""):
        # Beyond memory.high the kernel throttles us without end: blocks cannot be reclaimed.
        bounds = [_number(read(f"{folder}/memory.{name}")) for name in ("max", "high")]
        known = [bound for bound in bounds if bound is not None]
        used = _number(read(f"{folder}/memory.current")) if known else None
        if used is not None:
            cache = _reclaimable(read(f"{folder}/memory.stat"), "")
            yield _limit(f"cgroup {folder}", min(known), used, cache)


def _cgroup_v1(read: ReadText, groups: Groups) -> Iterator[Limit]:
    for folder in groups.folders(read, "cgroup", "memory"):
        bound = _number(read(f"{folder}/memory.limit_in_bytes"))
        if bound is None or bound >= _UNLIMITED:
            continue
        used = _number(read(f"{folder}/memory.usage_in_bytes"))
        if used is not None:
            cache = _reclaimable(read(f"{folder}/memory.stat"), "total_")
            yield _limit(f"cgroup {folder}", bound, used, cache)


def _limit(source: str, bound: int, used: int, cache: int) -> Limit:
    return Limit(source, bound, max(bound - max(used - cache, 0), 0))


def _own_path(read: ReadText, controller: str) -> str | None:
    """Our group in the hierarchy of `controller`; "" is version 2's. None if there is none."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path
    return None


def _folders(read: ReadText, kind: str, path: str | None) -> Iterator[str]:
    """Folders of our group and those above it, as far as they are mounted here."""
    if path is None:
        return
    for line in (read("/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, options = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(options) < 3 or options[0] != kind:
            continue
        if kind == "cgroup" and "memory" not in options[2].split(","):
            continue
        root, mount = _unescape(fields[3]), _unescape(fields[4])
        yield from _upwards(mount, _below(path, root))
        return


def _below(path: str, root: str) -> str:
    """`path` relative to what is mounted. A container often sees its own group as the mount's root,
    while the path is the host's.
    """
    if root == "/":
        inside = path
    elif path == root or path.startswith(root + "/"):
        inside = path[len(root) :]
    else:
        inside = "/"
    return "" if ".." in inside.split("/") else inside.strip("/")


def _upwards(mount: str, inside: str) -> Iterator[str]:
    while inside:
        yield os.path.join(mount, inside)
        inside = os.path.dirname(inside)
    yield mount


def _unescape(field: str) -> str:
    # mountinfo writes space, tab, newline and backslash as octal.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)


def _number(text: str | None) -> int | None:
    """A size; None for an absent file and for "max"."""
    stripped = (text or "").strip()
    return int(stripped) if stripped.isdecimal() else None


def _reclaimable(stat: str | None, prefix: str) -> int:
    """Page cache that the kernel gives up before it kills: the same share as MemAvailable counts.

    A file once read, such as a model's weights, stays in a group's usage for ever. Shared memory is
    not in these lists.
    """
    fields = dict(re.findall(r"(?m)^(\w+) (\d+)$", stat or ""))
    inactive = int(fields.get(f"{prefix}inactive_file", 0))
    active = int(fields.get(f"{prefix}active_file", 0))
    return inactive + active // 2
