"""The daemon's memory in this process: regions to read, staging to write, and the socket behind
them.

One `Memory` belongs to one session. Its thread speaks on the fd socket: it maps what the daemon
hands over, faults it in ahead in pieces, unmaps what the daemon closes and says so, and drops
everything by itself when the socket hangs up, whether or not anybody calls the client. A region
that is being copied or viewed stays in place until that is over, but not for ever: zeros take its
place when the client closes, or `KEPT_S` after the daemon has closed it. Nothing is read from it as
valid after `alive` is False or a slot's generation has changed.

Descriptors are closed as soon as they are mapped. What the daemon says is checked: a region whose
file is shorter, not sealed against shrinking, or laid out impossibly is refused (it could kill the
process with SIGBUS).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from google.protobuf.message import DecodeError

from kvstore import shm
from kvstore.model.reasons import Reason
from kvstore.wire.v1 import fd_pb2
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.channel import CallFailed
from kvstore_client.mapped import Region, Staging
from kvstore_client.pools import Access, NoPool

__all__ = ["Memory"]

log = logging.getLogger(__name__)

POPULATE_BYTES = 32 << 20
"""Faulted in at a time, some 10 ms: the socket is looked at in between."""
CLOSING_POLL_MS = 50
KEPT_S = 5.0
"""No lease holds a region that the daemon has closed: an array that is kept longer is no view."""
COPY_WAIT_S = 0.5
"""For a device's copy when the client closes; before that it is asked for again and again."""
AHEAD_REGIONS = 4
HEAR_OUT_S = 0.1
"""For answers that are on their way when the client closes."""
FRAME_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 1.0
GENERATION_BYTES = 8


class Memory:
    """See the module's docstring. Made by `Memory.attach`, ended by `close`."""

    def __init__(
        self,
        sock: socket.socket,
        regions: list[int],
        left: dict[int, list[Region | Staging]],
        *,
        populate: bool,
        on_hangup: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._populate = populate
        self._on_hangup = on_hangup
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._waking = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._seq = 1
        self._asked: dict[int, int] = {}  # seq -> region id, 0 for staging
        self._refused: dict[int, tuple[Reason, str]] = {}
        self._regions: dict[int, Region] = {}
        self._openers: dict[int, Access] = {}  # of regions that are asked for
        self._opening: dict[int, Region] = {}  # mapped, and still without the pool
        self._staging: Staging | None = None
        self._ahead = deque(regions) if populate else deque[int]()
        self._untouched: deque[tuple[shm.MappedRegion, int, bool]] = deque()
        # By region; an empty list is unmapped already and has to be told.
        self._closing: dict[int, list[Region | Staging]] = left
        self._kept_until: dict[int, float] = {}
        self._stopping = False
        self.alive = True
        self._thread = threading.Thread(target=self._watch, name="kvstore-memory", daemon=True)
        self._thread.start()

    @classmethod
    def attach(
        cls,
        sock: socket.socket,
        secret: bytes,
        timeout_s: float,
        *,
        populate: bool,
        on_hangup: Callable[[], None],
        previous: Memory | None = None,
    ) -> Memory:
        """Says Hello on a connected socket, which is taken over. Raises OSError (PermissionError
        when the daemon refuses).

        previous: that of this process's last session with the same daemon, which is told what
        became of its regions.
        """
        try:
            sock.settimeout(timeout_s)
            hello = fd_pb2.FdRequest(seq=1, hello=fd_pb2.FdHello(session=secret))
            with _own_pidfd() as pidfd:
                shm.send_frame(sock, hello.SerializeToString(), pidfd)
            frame, fds = shm.recv_frame(sock)
            shm.close_fds(fds)
            reply = fd_pb2.FdReply.FromString(frame)
            if reply.seq != 1 or reply.WhichOneof("reply") != "welcome":
                raise PermissionError(f"the fd socket refused: {Reason.from_wire(reply.reason)!r}")
            sock.settimeout(FRAME_TIMEOUT_S)
            regions = [info.region_id for info in reply.welcome.regions]
            left = {} if previous is None else previous.left_behind()
            return cls(sock, regions, left, populate=populate, on_hangup=on_hangup)
        except DecodeError as error:
            sock.close()
            raise ConnectionError("the fd socket answered garbage") from error
        except BaseException:
            sock.close()
            raise

    # ---------------------------------------------------------------- what an operation asks for

    def region(self, region_id: int, timeout_s: float, access: Access | None = None) -> Region:
        """The region, mapped now if it is not yet. access: opens its pool, if it is a device's.
        Raises CallFailed, NoPool if that pool cannot be opened.
        """
        region = self._regions.get(region_id)
        if region is not None:
            return region
        self._wait(region_id, lambda: region_id in self._regions, timeout_s, access)
        return self._regions[region_id]

    def staging(self, region_id: int, timeout_s: float) -> Staging:
        """The session's staging region, which the daemon calls `region_id`. Raises CallFailed."""

        def there() -> bool:
            return self._staging is not None and self._staging.id == region_id

        if not there():
            self._wait(0, there, timeout_s)
        staging = self._staging
        assert staging is not None
        return staging

    def _wait(
        self,
        region_id: int,
        there: Callable[[], bool],
        timeout_s: float,
        access: Access | None = None,
    ) -> None:
        with self._changed:
            if there():
                return  # it came before the lock was ours: asking again would map it twice
            self._refused.pop(region_id, None)
            if self.alive and region_id not in self._asked.values():
                if access is not None:
                    self._openers[region_id] = access
                self._ask(region_id)
            ended = self._changed.wait_for(
                lambda: there() or region_id in self._refused or not self.alive, timeout_s
            )
            if there():
                return
            if not self.alive:
                raise CallFailed(Reason.UNAVAILABLE, "the fd socket hung up", outage=True)
            if not ended:
                raise CallFailed(
                    Reason.DEADLINE_EXCEEDED, "the fd socket did not answer in time", outage=True
                )
            # Not taken out: others may wait for the same answer. The next who asks does that.
            refusal, detail = self._refused[region_id]
            raise NoPool(detail) if refusal is Reason.NOT_SUPPORTED else CallFailed(refusal)

    def _ask(self, region_id: int, *, device: bool = False) -> None:
        """Under the lock. device: for the memory of a device region, whose file is mapped."""
        self._seq = self._seq % 0xFFFF_FFFF + 1
        request = fd_pb2.FdRequest(seq=self._seq)
        if device:
            request.get_device.region_id = region_id
        elif region_id:
            request.get_region.region_id = region_id
        else:
            request.get_staging.SetInParent()
        self._asked[self._seq] = region_id
        self._send(request.SerializeToString())

    def _send(self, payload: bytes) -> None:
        try:
            with self._sending:
                shm.send_frame(self._sock, payload)
        except OSError:
            # Half a frame may be out: the watcher sees the end of the socket and tidies up.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    # ---------------------------------------------------------------- the watcher

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        try:
            while not self._stopping:
                ready = dict(poll.poll(self._pause_ms()))
                if self._sock.fileno() in ready:
                    self._receive()
                elif not self._finish_closing():
                    self._work_ahead()
        except (OSError, ValueError, DecodeError) as error:
            if not self._stopping:
                log.info("kvstore: the fd socket is gone (%s)", error)
        finally:
            self._end()

    def _pause_ms(self) -> int | None:
        if any(not held for held in self._closing.values()):
            return 0
        if self._untouched or (self._ahead and not self._asked):
            return 0
        return CLOSING_POLL_MS if self._closing else None

    def _receive(self) -> None:
        frame, fds = shm.recv_frame(self._sock)
        try:
            reply = fd_pb2.FdReply.FromString(frame)
            if reply.seq:
                self._answered(reply, fds)
            elif reply.WhichOneof("reply") == "unmap":
                self._close(reply.unmap.region_id)
        finally:
            shm.close_fds(fds)

    def _answered(self, reply: fd_pb2.FdReply, fds: list[int]) -> None:
        region_id = self._asked.get(reply.seq)
        if region_id is None:
            return
        mapped: Region | Staging | None = None
        refusal, detail = Reason.from_wire(reply.reason), ""
        is_device = reply.WhichOneof("reply") == "device"
        if refusal is Reason.OK and (fds or is_device):
            try:
                if is_device:
                    mapped = self._open(region_id, reply.device, fds[0] if fds else None)
                else:
                    mapped = self._map(region_id, reply, fds[0])
            except (OSError, ValueError) as error:
                log.warning("kvstore: region %d cannot be mapped: %s", region_id, error)
                refusal = Reason.REGION_UNKNOWN
            except NoPool as error:
                refusal, detail = error.reason, error.detail
        with self._changed:
            del self._asked[reply.seq]
            if isinstance(mapped, Region) and reply.region.HasField("device"):
                self._opening[region_id] = mapped
                self._ask(region_id, device=True)
                return
            self._openers.pop(region_id, None)
            if isinstance(mapped, Region):
                self._regions[mapped.id] = mapped
            elif isinstance(mapped, Staging):
                old, self._staging = self._staging, mapped
                if old is not None:
                    self._closing.setdefault(old.id, []).append(old)
            else:
                self._refused[region_id] = refusal, detail
                self._disown(region_id, reply)
            self._changed.notify_all()
        if mapped is not None and self._populate:
            self._untouched.append((mapped.memory, 0, isinstance(mapped, Staging)))

    def _map(self, region_id: int, reply: fd_pb2.FdReply, fd: int) -> Region | Staging:
        kind = reply.WhichOneof("reply")
        if region_id == 0 and kind == "staging":
            total_bytes = reply.staging.total_bytes
            memory = shm.map_region(
                fd, total_bytes, writable=True, populate=False, require=shm.Seal.SHRINK
            )
            shm.dontfork(memory)
            return Staging(reply.staging.region_id, memory)
        info = reply.region
        if kind != "region" or info.region_id != region_id:
            raise ValueError("another one was asked for")
        if not 0 < info.slots * GENERATION_BYTES <= info.data_offset <= info.total_bytes:
            raise ValueError("its layout is impossible")
        if info.HasField("device") and region_id not in self._openers:
            raise ValueError("it is a device's, and nobody asked for one")
        memory = shm.map_region(
            fd, info.total_bytes, writable=False, populate=False, require=shm.Seal.SHRINK
        )
        return Region(info, memory)

    def _open(self, region_id: int, device: pb.DeviceMemory, fd: int | None) -> Region:
        """The region of which this is the pool. NoPool: it cannot be opened."""
        region = self._opening.get(region_id)
        if region is None:
            raise ValueError("it was closed before its pool was there")
        try:
            if device.mapped_bytes < region.slots * region.slot_bytes:
                raise ValueError(f"{device.mapped_bytes} bytes do not hold its slots")
            region.hold(self._openers[region_id].open(device, fd))
        except Exception as error:  # of a driver, whatever it raises: this thread goes on
            raise NoPool(f"a pool cannot be opened: {error}") from error
        return self._opening.pop(region_id)

    def _close(self, region_id: int) -> None:
        """The daemon has closed a region: nobody gets it any more, and soon it is unmapped."""
        with self._changed:
            region: Region | Staging | None = self._regions.pop(
                region_id, self._opening.pop(region_id, None)
            )
            if self._staging is not None and self._staging.id == region_id:
                region, self._staging = self._staging, None
        self._untouched = deque(
            item for item in self._untouched if region is None or item[0] is not region.memory
        )
        held = self._closing.setdefault(region_id, [])
        if region is not None:
            held.append(region)
        self._finish_closing()

    def _finish_closing(self) -> bool:
        """Tells the daemon what nobody here views or copies any more, or for too long. True if it
        told anything.
        """
        told = False
        now_s = time.monotonic()
        for region_id, held in list(self._closing.items()):
            held[:] = [region for region in held if not region.drop()]
            until_s = self._kept_until.setdefault(region_id, now_s + KEPT_S)
            if held and (self._stopping or now_s >= until_s):
                _withdraw(held, COPY_WAIT_S if self._stopping else 0.0)
            if not held:
                del self._closing[region_id], self._kept_until[region_id]
                self._send(_unmapped(region_id))
                told = True
        return told

    def _work_ahead(self) -> None:
        if self._untouched:
            memory, start, write = self._untouched.popleft()
            length = min(POPULATE_BYTES, memory.total_bytes - start)
            try:
                shm.prefault(memory, start, length, write=write)
            except (OSError, ValueError):
                return  # closed meanwhile, or no memory now: it is faulted in when it is read
            if start + length < memory.total_bytes:
                self._untouched.append((memory, start + length, write))
        elif self._ahead and not self._asked:
            with self._changed:
                for _ in range(min(AHEAD_REGIONS, len(self._ahead))):
                    region_id = self._ahead.popleft()
                    if region_id not in self._regions:
                        self._ask(region_id)

    # ---------------------------------------------------------------- end

    def _disown(self, region_id: int, reply: fd_pb2.FdReply) -> None:
        """Of an answer that was not mapped: the daemon counts it as mapped until it is told
        otherwise. region_id: what was asked for, 0 for staging.
        """
        opening = self._opening.pop(region_id, None)
        if opening is not None:
            self._closing.setdefault(region_id, []).append(opening)
        elif reply.WhichOneof("reply") in ("region", "staging", "device"):
            self._closing.setdefault(region_id or reply.staging.region_id, [])

    def _hear_out(self) -> None:
        """Takes the answers that are still to come before hanging up, and disowns what they bring:
        the daemon would else count it as mapped by this process for as long as that lives.
        """
        until_s = time.monotonic() + HEAR_OUT_S
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        with contextlib.suppress(OSError, ValueError, DecodeError):
            while self._asked and poll.poll(max(until_s - time.monotonic(), 0) * 1e3):
                frame, fds = shm.recv_frame(self._sock)
                shm.close_fds(fds)
                reply = fd_pb2.FdReply.FromString(frame)
                region_id = self._asked.pop(reply.seq, None)
                if region_id is not None:
                    self._disown(region_id, reply)
        for region_id in filter(None, self._asked.values()):
            self._closing.setdefault(region_id, [])  # heard after the request itself

    def _end(self) -> None:
        """In the watcher: drops all maps. Views keep theirs until the last one goes."""
        with self._changed:
            self.alive = False
            held: list[Region | Staging] = [*self._regions.values(), *self._opening.values()]
            if self._staging is not None:
                held.append(self._staging)
            for region in held:
                self._closing.setdefault(region.id, []).append(region)
            self._regions.clear()
            self._opening.clear()
            self._staging = None
            self._changed.notify_all()
        if self._stopping:
            self._hear_out()
            self._finish_closing()
        else:
            # Nobody can be told now; unmapped at once all the same.
            for held in self._closing.values():
                held[:] = [region for region in held if not region.drop()]
        self._sock.close()
        self._close_wake_fd()
        if not self._stopping:
            self._on_hangup()

    def left_behind(self) -> dict[int, list[Region | Staging]]:
        """After the end: regions that the daemon has not been told of, with what still holds them.
        It counts them as mapped by this process for as long as both of them live.
        """
        left, self._closing = self._closing, {}
        return left

    def close(self) -> None:
        """Unmaps, tells the daemon, hangs up. Idempotent; waits for the watcher."""
        self._stopping = True
        with self._waking:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    def forget_in_child(self) -> None:
        """After a fork: unmaps and closes what was inherited, without a word to the daemon."""
        self.alive = False
        self._stopping = True
        for region in [*self._regions.values(), *self._opening.values()]:
            region.drop()
        for held in list(self._closing.values()):
            for one in held:
                one.drop()
        if self._staging is not None:
            self._staging.gone = True
        self._sock.close()
        # No thread but this one is left; the lock may have been held by another.
        self._waking = threading.Lock()
        self._close_wake_fd()

    def _close_wake_fd(self) -> None:
        """Once, and nobody writes to its number afterwards: another file may have it by then."""
        with self._waking:
            wake_fd, self._wake_fd = self._wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)


def _withdraw(held: list[Region | Staging], wait_s: float) -> None:
    for region in list(held):
        try:
            if region.withdraw(wait_s):
                held.remove(region)
        except OSError as error:
            log.warning("kvstore: region %d cannot be given back yet: %s", region.id, error)
            return


def _unmapped(region_id: int) -> bytes:
    request = fd_pb2.FdRequest(seq=1, unmapped=fd_pb2.Unmapped(region_id=region_id))
    return request.SerializeToString()


@contextlib.contextmanager
def _own_pidfd() -> Iterator[int | None]:
    """A descriptor of this process, None where the kernel has none to give."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except OSError:
        yield None
        return
    try:
        yield pidfd
    finally:
        os.close(pidfd)
