"""As in two containers of a pod: other users, separate namespaces, one shared folder; and a memory
limit that is smaller than what is asked for.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon import DaemonDied, _python_path, make_daemon
from tests.e2e.stage import Child, Prompt, assert_quiet, held, model, record, until
from tests.rawclient import RawAdmin, RawClient

pytestmark = [pytest.mark.process, pytest.mark.root]

Note = Callable[[str, object], None]

DAEMON_UID, CLIENT_UID, GROUP = 65_534, 64_001, 64_000
UNSHARE = ("unshare", "--mount", "--pid", "--ipc", "--fork")
HERE = Path(__file__).resolve().parent


def why_no_namespaces() -> str | None:
    for tool in ("unshare", "setpriv", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    tried = subprocess.run(
        [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else f"no namespaces: {tried.stderr.decode().strip()}"


def contained(uid: int, shared: Path) -> tuple[str, ...]:
    """What to put before a command so that it runs in namespaces of its own as this user."""
    script = str(HERE / "namespaces.py")
    return (*UNSHARE, sys.executable, script, str(uid), str(GROUP), str(shared))


# ---------------------------------------------------------------- a pod


@pytest.fixture
def shared() -> Iterator[Path]:
    """The folder that both see; nothing else is common to them."""
    if why := why_no_namespaces():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="kvstore-pod-"))
    os.chown(folder, DAEMON_UID, GROUP)
    folder.chmod(0o2750)
    yield folder
    shutil.rmtree(folder)


class Pod:
    """A daemon in a container, whose sockets the client's group may use.

    Not a `Daemon`: the pid that it reports is one of its own namespace, here it is another process.
    """

    def __init__(self, shared: Path, log: Path) -> None:
        self.path = str(shared / "run" / "data.sock")
        self.admin_socket = str(shared / "run" / "admin.sock")
        ready = shared / "ready"
        settings = {
            "server.runtime_dir": str(shared / "run"),
            "host.capacity_bytes": "32MiB",
            "host.mlock": "off",
            "tenants.default.mode": "0660",
            "tenants.default.group": str(GROUP),
            "admin.mode": "0660",
            "http.listen": "",
        }
        flags = [f"--{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "kvstore_server", "serve", f"--ready-file={ready}", *flags]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
        environ["PYTHONPATH"] = _python_path(environ)
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*contained(DAEMON_UID, shared), *command],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ,
            )  # fmt: skip
        try:
            until("the contained daemon is ready", lambda: ready.exists() or self._ended(log), 20)
        except BaseException:
            self.end()
            raise
        self.pid = inner_pid(self.process.pid)

    def _ended(self, log: Path) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"ended with {self.process.returncode}: {log.read_text()}")
        return False

    def end(self) -> None:
        end_container(self.process.pid)
        self.process.wait(20)


def end_container(outer: int) -> None:
    """Ends everything in the namespaces that `unshare` (pid `outer`) has made.

    It is asked for by the inner process: a change of user loses what ties that to its parent.
    """
    children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    for pid in children or [str(outer)]:
        os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def pod(shared: Path, tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(shared, tmp_path / "kvstored.log")
    try:
        yield pod
    finally:
        pod.end()


def namespaces(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("mnt", "pid", "ipc")}


def inner_pid(outer: int) -> int:
    """The one process inside the pid namespace that `unshare` (pid `outer`) has made."""
    children = Path(f"/proc/{outer}/task/{outer}/children")
    return int(until("the contained process", lambda: children.read_text().split())[0])


def test_put_and_get_between_containers_go_through_shared_memory(pod: Pod, shared: Path) -> None:
    path = str(shared / "run" / "data.sock")
    daemon_pid = inner_pid(pod.process.pid)
    prefix = contained(CLIENT_UID, shared)
    with Child("sdk_roundtrip", path, "put", 5, prefix=prefix) as writer:
        put = writer.hear(60)
        writer_pid = inner_pid(writer.pid)
        # They are what they claim to be: other users, no namespace and no /dev/shm in common.
        assert status_uid(daemon_pid) == DAEMON_UID
        assert status_uid(writer_pid) == CLIENT_UID
        assert not namespaces(daemon_pid) & namespaces(writer_pid)
        assert not namespaces(daemon_pid) & namespaces(os.getpid())
        devices = {shm_device(pid) for pid in (daemon_pid, writer_pid, os.getpid())}
        assert len(devices) == 3
        assert (put["stored"], put["reason"], put["kind"]) == (16, "OK", "shm")
        assert put["mapped"], "no memory of the store is mapped: bytes went another way"
        with Child("sdk_roundtrip", path, "get", 5, prefix=prefix) as reader:
            got = reader.hear(60)
            assert (got["right"], got["reason"], got["kind"]) == (16, "OK", "shm")
            assert got["mapped"]
    with RawAdmin(pod.admin_socket) as admin:
        counters = dict(admin.stats().counters)
        streamed = [name for name in counters if 'op="fetch"' in name or 'op="push"' in name]
        assert streamed == []


def status_uid(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    raise AssertionError("no uid")


def shm_device(pid: int) -> str:
    """Which file system is at /dev/shm there."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return [line.split()[2] for line in lines if line.split()[4] == "/dev/shm"][-1]


@pytest.mark.parametrize("victim", ["a process", "the container"])
def test_death_of_a_contained_client_is_noticed(
    pod: Pod, shared: Path, record_property: Note, victim: str
) -> None:
    """One process of its container, whose forked child lives on; or all of them at once."""
    shell = ("sh", "-c", '"$@"; exec sleep 60', "sh")
    prefix = (*contained(CLIENT_UID, shared), *shell)
    with RawAdmin(pod.admin_socket) as admin:
        with Child("hold", pod.path, "g0", "fork", prefix=prefix) as child:
            said = child.hear(60)
            assert said["forked"]
            before = held(admin.stats())
            assert before["write_leases"] == 8
            assert before["view_leases"] == 8
            init = inner_pid(child.pid)
            client = inner_pid(init)
            forked = inner_pid(client)
            os.kill(client if victim == "a process" else init, signal.SIGKILL)
            seconds = assert_quiet(admin, 4096)
            record(record_property, f"freed_after_death_of_{victim.split()[1]}", seconds)
            if victim == "a process":
                assert Path(f"/proc/{forked}").exists()
                os.kill(init, signal.SIGKILL)
            until("its fork has ended", lambda: not Path(f"/proc/{forked}").exists())
        with RawClient(pod.path, group=b"outside") as heir:
            space = heir.open(model()).space_id
            prompt = Prompt(model(), int.from_bytes(b"g0", "little"), blocks=24)
            heir.put(space, prompt.keys, prompt.rows())
            prompt.assert_right(heir.get(space, prompt.keys))


def test_a_user_outside_the_group_may_not_connect(pod: Pod, shared: Path) -> None:
    for name in ("data.sock", "data.sock.fd"):
        socket_file = (shared / "run" / name).stat()
        assert stat.S_IMODE(socket_file.st_mode) == 0o660
        assert (socket_file.st_uid, socket_file.st_gid) == (DAEMON_UID, GROUP)


# ---------------------------------------------------------------- a memory limit

LIMIT = 448 << 20
"""Of which the daemon keeps 256 MiB for itself, beside the arena."""


class Cgroup:
    """A memory cgroup of this test, below our own."""

    def __init__(self, folder: Path, limit_file: str) -> None:
        self.folder = folder
        self.limit_file = limit_file

    @property
    def prefix(self) -> tuple[str, ...]:
        """Enters the group, then runs the command."""
        return ("sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh")

    def limit(self, limit_bytes: int) -> None:
        (self.folder / self.limit_file).write_text(str(limit_bytes))

    def oom_kills(self) -> int:
        name = "memory.oom_control" if "limit" in self.limit_file else "memory.events"
        for line in (self.folder / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0


def own_cgroup() -> tuple[Path, str] | str:
    """(our memory cgroup's folder, the limit's file), or why there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            for mounted in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
                folder = Path(f"{mounted}{path}")
                if (folder / "memory.limit_in_bytes").exists():
                    return folder, "memory.limit_in_bytes"
        if not controllers:
            folder = Path(f"/sys/fs/cgroup{path}")
            enabled = folder / "cgroup.subtree_control"
            if enabled.exists() and "memory" in enabled.read_text().split():
                return folder, "memory.max"
    return "no memory controller in our cgroup"


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    found = own_cgroup()
    if isinstance(found, str):
        pytest.skip(found)
    parent, limit_file = found
    group = Cgroup(parent / f"kvstore-test-{os.getpid()}", limit_file)
    try:
        group.folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of our own: {error}")
    try:
        group.limit(LIMIT)
        yield group
    finally:
        until("the cgroup is empty", lambda: not (group.folder / "cgroup.procs").read_text())
        group.folder.rmdir()


def test_a_cgroup_smaller_than_the_arena_is_a_typed_exit(cgroup: Cgroup, tmp_path: Path) -> None:
    daemon = make_daemon(tmp_path, argv_prefix=cgroup.prefix, host__capacity_bytes="1GiB")
    with pytest.raises(DaemonDied) as died, daemon:
        daemon.start()
    assert died.value.code == 2
    said = died.value.output
    assert "host.capacity_bytes" in said
    assert "MiB" in said
    assert "Traceback" not in said
    assert cgroup.oom_kills() == 0


def test_a_smaller_start_fits_into_the_cgroup_and_fills_it(
    cgroup: Cgroup, tmp_path: Path, record_property: Note
) -> None:
    """Allowed to be smaller, it starts with what fits, and full to the brim it is not killed."""
    daemon = make_daemon(
        tmp_path,
        argv_prefix=cgroup.prefix,
        host__capacity_bytes="1GiB",
        host__allow_smaller=True,
        host__staging_bytes="4MiB",
    )
    with daemon:
        daemon.start()
        granted = int(daemon.ready["capacity_bytes"])
        record(record_property, "granted_of_448_MiB", granted / (1 << 20), "MiB")
        assert 8 << 20 <= granted < LIMIT
        fingerprint = model(1 << 20)
        with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
            space = client.open(fingerprint).space_id
            for number in range(2 * granted // (8 << 20)):
                prompt = Prompt(fingerprint, number, blocks=8)
                client.put(space, prompt.keys, prompt.rows())
            prompt.assert_right(client.get(space, prompt.keys))
            assert admin.stats().tiers[0].evictions > 0
        assert daemon.alive
        assert cgroup.oom_kills() == 0
        assert daemon.stop() == 0


def test_an_arena_that_fits_starts(cgroup: Cgroup, tmp_path: Path) -> None:
    with make_daemon(tmp_path, argv_prefix=cgroup.prefix, host__capacity_bytes="32MiB") as daemon:
        assert daemon.start().ready["capacity_bytes"] == 32 << 20
