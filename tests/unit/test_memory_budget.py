"""What may be used, from the files that say so: /proc and both versions of cgroups."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore.model.reasons import Reason, StartError
from kvstore.tiers import memory_budget as budget
from kvstore.tiers.memory_budget import MIB, ReadText

GIB = 1024 * MIB


def meminfo(total: int = 64 * GIB, available: int = 32 * GIB, more: str = "") -> dict[str, str]:
    text = (
        f"MemTotal: {total // 1024:>15} kB\nMemFree: 17 kB\nMemAvailable: {available // 1024} kB\n"
    )
    return {"/proc/meminfo": text + more}


def reader(*files: dict[str, str]) -> ReadText:
    merged = {path: text for group in files for path, text in group.items()}
    return merged.get


def v2(path: str = "/a/b", root: str = "/", mount: str = "/sys/fs/cgroup") -> dict[str, str]:
    return {
        "/proc/self/cgroup": f"0::{path}\n",
        "/proc/self/mountinfo": "22 1 0:20 / /proc rw - proc proc rw\n"
        f"31 23 0:27 {root} {mount} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
    }


def group2(
    folder: str, limit: int | str, used: int, *, high: int | str = "max", stat: str = ""
) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


def v1(path: str = "/docker/x", root: str = "/", mount: str = "/cg/memory") -> dict[str, str]:
    return {
        "/proc/self/cgroup": f"12:cpu,cpuacct:/other\n4:memory:{path}\n1:name=systemd:/\n0::/\n",
        "/proc/self/mountinfo": "40 1 0:31 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"41 1 0:32 {root} {mount} rw - cgroup cgroup rw,memory\n",
    }


def group1(folder: str, limit: int, used: int, stat: str = "") -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


def available(read: ReadText) -> int:
    limit = budget.tightest(read)
    assert limit is not None
    return limit.available_bytes


# ---------------------------------------------------------------- what there is


def test_without_cgroups_the_machine_decides() -> None:
    read = reader(meminfo(available=5 * GIB))
    assert available(read) == 5 * GIB
    assert budget.total_bytes(read) == 64 * GIB


def test_nothing_readable_is_nothing_known() -> None:
    assert budget.tightest(reader()) is None
    assert budget.total_bytes(reader()) is None
    assert budget.check(GIB, allow_smaller=False, read=reader()).granted_bytes == GIB


def test_own_group_of_version_2() -> None:
    read = reader(meminfo(), v2(), group2("/sys/fs/cgroup/a/b", 4 * GIB, GIB))
    assert available(read) == 3 * GIB
    assert budget.total_bytes(read) == 4 * GIB


@pytest.mark.parametrize("folder", ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"])
def test_every_group_above_counts(folder: str) -> None:
    groups = {
        f: group2(f, "max", GIB)
        for f in ("/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup")
    }
    groups[folder] = group2(folder, 2 * GIB, GIB)
    read = reader(meminfo(), v2(), *groups.values())
    limit = budget.tightest(read)
    assert limit is not None
    assert limit.available_bytes == GIB
    assert folder in limit.source


def test_throttling_counts_as_a_limit() -> None:
    group = group2("/sys/fs/cgroup/a/b", 4 * GIB, GIB, high=2 * GIB)
    assert available(reader(meminfo(), v2(), group)) == GIB


def test_page_cache_is_not_used_memory() -> None:
    stat = f"anon {GIB}\nshmem {GIB}\ninactive_file {GIB}\nactive_file {GIB}\n"
    group = group2("/sys/fs/cgroup/a/b", 4 * GIB, 4 * GIB, stat=stat)
    assert available(reader(meminfo(), v2(), group)) == GIB + GIB // 2


def test_a_group_over_its_limit_has_nothing_left() -> None:
    group = group2("/sys/fs/cgroup/a/b", GIB, 2 * GIB)
    assert available(reader(meminfo(), v2(), group)) == 0


@pytest.mark.parametrize(
    ("path", "root"), [("/docker/x", "/docker/x"), ("/../../other", "/"), ("/elsewhere", "/docker")]
)
def test_a_containers_group_may_be_the_mount_itself(path: str, root: str) -> None:
    read = reader(meminfo(), v2(path, root), group2("/sys/fs/cgroup", 2 * GIB, GIB))
    assert available(read) == GIB


def test_a_mount_may_show_a_part_of_the_tree() -> None:
    read = reader(
        meminfo(),
        v2("/pods/p1/c", "/pods/p1", "/sys/fs/my\\040groups"),
        group2("/sys/fs/my groups/c", 2 * GIB, GIB),
    )
    assert available(read) == GIB


def test_own_group_of_version_1() -> None:
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n"
    read = reader(meminfo(), v1(), group1("/cg/memory/docker/x", 4 * GIB, 3 * GIB, stat))
    assert available(read) == 2 * GIB


def test_groups_above_and_no_limit_in_version_1() -> None:
    read = reader(
        meminfo(),
        v1(),
        group1("/cg/memory/docker/x", 9223372036854771712, GIB),
        group1("/cg/memory/docker", 3 * GIB, GIB),
        group1("/cg/memory", 9223372036854771712, GIB),
    )
    assert available(read) == 2 * GIB
    assert budget.total_bytes(read) == 3 * GIB


def test_a_machine_that_does_not_overcommit() -> None:
    more = f"CommitLimit: {6 * GIB // 1024} kB\nCommitted_AS: {4 * GIB // 1024} kB\n"
    strict = {"/proc/sys/vm/overcommit_memory": "2\n"}
    assert available(reader(meminfo(more=more), strict)) == 2 * GIB
    assert available(reader(meminfo(more=more))) == 32 * GIB


@pytest.mark.parametrize(
    ("mounts", "group"),
    [
        (v2(), group2("/sys/fs/cgroup/a/b", 4 * GIB, GIB)),
        (v1("/x", mount="/cg/memory"), group1("/cg/memory/x", 4 * GIB, GIB)),
    ],
    ids=["version 2", "version 1"],
)
def test_who_asks_every_second_has_groups_looked_up_now_and_then(
    mounts: dict[str, str], group: dict[str, str]
) -> None:
    files = {**meminfo(), **mounts, **group}
    asked: Counter[str] = Counter()

    def read(path: str) -> str | None:
        asked[path] += 1
        return files.get(path)

    groups = budget.Groups()
    for looks in range(budget.LOOKS):
        limit = budget.tightest(read, groups)
        assert limit is not None
        assert limit.available_bytes == 3 * GIB - looks * MIB, "what is used is read each time"
        for path in group:
            if "current" in path or "usage" in path:
                files[path] = f"{GIB + (looks + 1) * MIB}\n"
    assert asked["/proc/self/mountinfo"] <= 2, "for either version once"
    files.update({path: "1\n" for path in group if "max" in path or "limit" in path})
    before = asked["/proc/self/mountinfo"]
    again = budget.tightest(read, groups)
    assert asked["/proc/self/mountinfo"] > before, "a process may be moved"
    assert again == budget.tightest(read)


def test_a_group_without_a_bound_is_not_asked_what_it_uses() -> None:
    files = {**meminfo(), **v2(), **group2("/sys/fs/cgroup/a/b", "max", GIB)}
    asked: list[str] = []

    def read(path: str) -> str | None:
        asked.append(path)
        return files.get(path)

    budget.limits(read)
    assert "/sys/fs/cgroup/a/b/memory.max" in asked
    assert not [path for path in asked if path.endswith(("current", "stat"))]


def test_this_machine_can_be_read() -> None:
    limit = budget.tightest()
    assert limit is not None
    assert 0 < limit.available_bytes <= limit.total_bytes
    assert budget.read_text("/proc/self/no-such-file") is None


# ---------------------------------------------------------------- what is granted


def test_what_fits_is_granted_without_a_word() -> None:
    read = reader(meminfo(available=GIB))
    need = GIB - 256 * MIB
    assert budget.check(need, allow_smaller=False, read=read) == (need, "")


def test_one_byte_too_much_is_a_start_error_with_numbers() -> None:
    read = reader(meminfo(), v2(), group2("/sys/fs/cgroup/a/b", 1000 * MIB, 0))
    with pytest.raises(StartError) as refused:
        budget.check(744 * MIB + 1, allow_smaller=False, read=read)
    error = refused.value
    assert error.reason is Reason.START_MEMORY
    assert error.setting == "host.capacity_bytes"
    for text in ("745 MiB", "256 MiB", "1000 MiB", "/sys/fs/cgroup/a/b", "at most 744 MiB"):
        assert text in error.detail


def test_a_smaller_grant_is_whole_mib_and_gives_its_reason() -> None:
    read = reader(meminfo(available=1000 * MIB + 5 * 1024))
    grant = budget.check(2 * GIB, allow_smaller=True, read=read)
    assert grant.granted_bytes == 744 * MIB
    assert "2048 MiB" in grant.reason
    assert "744 MiB" in grant.reason


def test_a_grant_has_a_least_size() -> None:
    read = reader(meminfo(available=256 * MIB + 64 * MIB - 1024))
    with pytest.raises(StartError, match="raise the memory limit"):
        budget.check(GIB, allow_smaller=True, read=read)
    just = reader(meminfo(available=256 * MIB + 64 * MIB))
    assert budget.check(GIB, allow_smaller=True, read=just).granted_bytes == 64 * MIB


def test_a_small_wish_needs_no_least_size() -> None:
    read = reader(meminfo(available=300 * MIB))
    assert budget.check(8 * MIB, allow_smaller=True, read=read) == (8 * MIB, "")


@pytest.mark.parametrize(
    ("wanted", "granted", "touched", "available", "more"),
    [
        (4 * GIB, GIB, GIB, 8 * GIB, 3 * GIB),  # all of it fits by now
        (4 * GIB, GIB, GIB, GIB + 256 * MIB + 17, GIB),  # some of it, in whole MiB
        (4 * GIB, GIB, 0, GIB + 256 * MIB, 0),  # what is free belongs to the grant already
        (4 * GIB, GIB, GIB, 10 * MIB, 0),
        (GIB, GIB, 0, 8 * GIB, 0),
        (GIB, 2 * GIB, 0, 8 * GIB, 0),
        (GIB + 5, GIB, GIB, 8 * GIB, 5),
    ],
)
def test_regrant(wanted: int, granted: int, touched: int, available: int, more: int) -> None:
    assert budget.regrant(wanted, granted, touched, available) == more


# ---------------------------------------------------------------- locking


LOCKABLE: list[tuple[int | None, str, bool]] = [
    (None, "", True),
    (GIB, "", True),
    (GIB - 1, "", False),
    (GIB - 1, "CapEff:\t0000000000004000\n", True),
    (GIB - 1, "CapEff:\t0000000000003fff\n", False),
    (0, "CapPrm:\t0000000000004000\nCapEff:\t0000000000000000\n", False),
]


@pytest.mark.parametrize(("limit", "status", "may"), LOCKABLE)
def test_locking(limit: int | None, status: str, may: bool) -> None:
    why = budget.why_not_lockable(GIB, limit, reader({"/proc/self/status": status}))
    assert (why == "") is may
    assert may or ("RLIMIT_MEMLOCK" in why and "1024 MiB" in why and "CAP_IPC_LOCK" in why)
