"""A daemon in this process for tests: the verbs of the data service over a dictionary, with memory
that is really shared.

It keeps the contract that a client can see (first writer wins, nothing visible before its commit,
generations change before bytes do), and nothing that takes a policy: it has no tiers, no quota, no
expiry, and evicts only what `drop` names. Import it from `kvstore_client.testing`.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import shm
from kvstore.model.fingerprint import Verdict
from kvstore.model.keys import unpack_keys
from kvstore.model.layout import Layout, layout_of
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.wire import convert, status
from kvstore.wire.v1 import fd_pb2
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.fakespaces import Leased, Reservation, Space, send_lease

if TYPE_CHECKING:
    from kvstore_client.channel import Transport

__all__ = ["RESERVE_TTL_MS", "FakeStore"]

CHUNK_BYTES = 64 << 10
RESERVE_TTL_MS = 30_000
OK = pb.REASON_OK
_ids = itertools.count(1)


class FakeStore:
    """See the module's docstring.

    capacity_blocks: of each space; a push beyond it is answered NO_SPACE. staging_bytes: of each
    session. shared_memory False: clients have to use byte streams. `requests` counts calls by
    method, `leases` are those that nobody has released, `outcomes` and `audits` what was reported.
    withhold, ask_for_audits: all look-ups are held out; all hits are to be audited.
    """

    def __init__(
        self,
        *,
        capacity_blocks: int = 256,
        staging_bytes: int = 1 << 20,
        shared_memory: bool = True,
        keys_per_call_max: int = 16_384,
    ) -> None:
        self.capacity_blocks = capacity_blocks
        self.staging_bytes = staging_bytes
        self.shared_memory = shared_memory
        self.keys_per_call_max = keys_per_call_max
        self.withhold = self.ask_for_audits = False
        self.instance_id = secrets.token_bytes(16)
        self.requests: Counter[str] = Counter()
        self.reports: list[pb.LoadReport] = []
        self.outcomes: list[pb.RequestReport] = []
        self.audits: list[pb.AuditReport] = []
        self.leases: set[int] = set()
        self.unmapped: list[int] = []
        self._lock = threading.Condition(threading.RLock())
        self._spaces: dict[int, Space] = {}
        self._sessions: set[bytes] = set()
        self._staging: dict[bytes, tuple[int, shm.SharedRegion]] = {}
        self._reservations: dict[int, Reservation] = {}
        self._held: dict[int, list[Leased | None]] = {}  # by lease, also of those that ended
        self._granted: dict[tuple[bytes, int], int] = {}
        self._sockets: list[socket.socket] = []

    # ---------------------------------------------------------------- for the test

    def transport(self) -> Transport:
        """A connection, for `Client(transport=store.transport)`."""
        from kvstore_client.testing import FakeTransport  # it exports this class

        return FakeTransport(self.answer, self.dial)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Evicts blocks of all spaces: the slot's generation changes, then its bytes."""
        with self._lock:
            for space in self._spaces.values():
                for key in keys:
                    slot = space.slots.pop(key, None)
                    space.parts.pop(key, None)
                    if slot is not None:
                        space.region.map.generations(space.info.slots)[slot] += 1
                        space.bytes_of(slot)[:] = 0xEE
                        space.free.append(slot)

    def restart(self) -> None:
        """Another daemon process: sessions, blocks and memory of the old one are gone."""
        with self._lock:
            self.instance_id = secrets.token_bytes(16)
            self._sessions.clear()
            for region in self._regions():
                region.close()
            self._spaces.clear()
            self._staging.clear()
            self._reservations.clear()
            self.leases.clear()
        self.hang_up()

    def close(self) -> None:
        """Gives its memory back; clients see a daemon that is gone."""
        self.restart()

    def _regions(self) -> list[shm.SharedRegion]:
        return [
            *(space.region for space in self._spaces.values()),
            *(region for _, region in self._staging.values()),
        ]

    def wait(self, until: Callable[[FakeStore], bool], timeout_s: float = 10.0) -> bool:
        """Waits until something holds of this store: what clients do in the background (releases,
        unmapping) takes its time. False if it does not come to pass.
        """
        with self._lock:
            return self._lock.wait_for(lambda: until(self), timeout_s)

    def hang_up(self) -> None:
        """Closes all fd sockets."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def unmap(self) -> None:
        """Tells all clients to unmap all regions of blocks, as when they are reclaimed."""
        with self._lock:
            regions = [space.info.region_id for space in self._spaces.values()]
            sockets = list(self._sockets)
        for sock in sockets:
            for region_id in regions:
                event = fd_pb2.FdReply(unmap=fd_pb2.Unmap(region_id=region_id))
                shm.send_frame(sock, event.SerializeToString())

    def answer(self, method: str, request: Any) -> Any:
        """The answer to a call: a message, a sequence of them for Fetch, or a FakeRpcError."""
        from kvstore_client.testing import FakeRpcError

        with self._lock:
            self.requests[method] += 1
            self._lock.notify_all()
            try:
                if method == "Attach":
                    return self._attach(request)
                secret = request[0].reserve.session if method == "Push" else request.session
                if secret not in self._sessions:
                    raise KVStoreError(Reason.SESSION_UNKNOWN, "no such session")
                verb: Callable[[Any], Any] = getattr(self, f"_{method.lower()}")
                return verb(request)
            except KVStoreError as error:
                return FakeRpcError(status.code_of(error.reason), error)

    # ---------------------------------------------------------------- sessions and spaces

    def _attach(self, request: pb.AttachRequest) -> pb.AttachEvent:
        if request.protocol_major != 1:
            raise KVStoreError(Reason.PROTOCOL_VERSION, "this is version 1")
        secret = secrets.token_bytes(16)
        self._sessions.add(secret)
        welcome = pb.Welcome(
            session=secret,
            instance_id=self.instance_id,
            daemon_version="fake",
            fd_socket=self.shared_memory,
            fd_fetch=self.shared_memory,
            tiers=["host"],
            limits=pb.Limits(
                keys_per_call_max=self.keys_per_call_max,
                staging_bytes=self.staging_bytes,
                message_bytes_max=16 << 20,
                part_bytes_max=256 << 20,
                reserve_ttl_ms_max=RESERVE_TTL_MS,
            ),
        )
        return pb.AttachEvent(welcome=welcome)

    def _detach(self, request: pb.DetachRequest) -> pb.DetachReply:
        self._end(request.session)
        return pb.DetachReply()

    def _end(self, session: bytes) -> None:
        """A session is over, and what it was writing."""
        self._sessions.discard(session)
        staging = self._staging.pop(session, None)
        if staging is not None:
            staging[1].close()
        self._reservations = {
            lease_id: one for lease_id, one in self._reservations.items() if one.session != session
        }

    def _open(self, request: pb.OpenRequest) -> pb.OpenReply:
        fingerprint = convert.fingerprint_from_wire(request.fingerprint)
        found = [one for one in self._spaces.values() if one.digest == fingerprint.digest]
        space = found[0] if found else self._new_space(fingerprint.digest, layout_of(fingerprint))
        held = bool(fingerprint.missing())
        return pb.OpenReply(
            verdict=convert.VERDICTS[Verdict.HELD if held else Verdict.MATCH],
            space_id=space.id,
            reason=pb.REASON_HELD_FOR_REVIEW if held else OK,
            fingerprint_digest=space.digest,
            missing=fingerprint.missing(),
            block_bytes=space.layout.block_bytes,
            slot_bytes=space.layout.slot_bytes,
            parts=len(space.layout.parts),
        )

    def _new_space(self, digest: bytes, layout: Layout) -> Space:
        number, slots = next(_ids), self.capacity_blocks
        offset = shm.header_bytes(slots)
        total = offset + slots * layout.slot_bytes
        region = shm.create_region(total, "kvstore-fake")
        region.seal(shm.ARENA_SEALS)
        info = pb.RegionInfo(
            region_id=number,
            slot_bytes=layout.slot_bytes,
            slots=slots,
            data_offset=offset,
            total_bytes=total,
        )
        space = Space(number, digest, layout, region, info, free=list(range(slots))[::-1])
        self._spaces[number] = space
        return space

    def _space(self, space_id: int) -> Space:
        try:
            return self._spaces[space_id]
        except KeyError:
            raise KVStoreError(Reason.SPACE_UNKNOWN, "no such space") from None

    # ---------------------------------------------------------------- reads

    def _lookup(self, request: pb.LookupRequest) -> pb.LookupReply:
        query = request.queries[0]
        space = self._space(query.space_id)
        keys = unpack_keys(query.keys)
        codes = bytes(map(space.ready, keys))
        run = codes.find(0) if 0 in codes else len(keys)
        cost = OK if request.HasField("prefill") else pb.REASON_COST_UNKNOWN
        plan = pb.Plan(load_blocks=run, reason=cost if run else pb.REASON_NOTHING_TO_DO)
        if self.withhold and run:
            plan = pb.Plan(reason=pb.REASON_DECLINED_HOLDOUT)
        return pb.LookupReply(
            groups=[
                pb.GroupHit(
                    hit_blocks=run,
                    tiers=codes,
                    reason=OK if run == len(keys) else pb.REASON_MISS_NEVER_STORED,
                    fingerprint_digest=space.digest,
                )
            ],
            agreed_tokens=run * space.layout.block_tokens,
            plan=plan,
            arm=pb.ARM_HELD_OUT if self.withhold else pb.ARM_APPLIED,
            audit=self.ask_for_audits and bool(plan.load_blocks),
        )

    def _acquire(self, request: pb.AcquireRequest) -> pb.AcquireReply:
        space = self._space(request.space_id)
        keys = unpack_keys(request.keys)
        there = [space.ready(key) for key in keys]
        reply = pb.AcquireReply(
            reason=OK if all(there) else pb.REASON_MISS_NEVER_STORED,
            fingerprint_digest=space.digest,
            block_bytes=space.layout.block_bytes,
        )
        if not any(there) or (request.all_or_nothing and not all(there)):
            return reply
        generations = space.region.map.generations(space.info.slots)
        reply.places = convert.pack_places(
            (space.info.region_id, space.slots[key], int(generations[space.slots[key]]))
            if ready
            else None
            for key, ready in zip(keys, there, strict=True)
        )
        reply.regions.append(space.info)
        reply.leased_blocks = sum(there)
        reply.lease_id = next(_ids)
        self.leases.add(reply.lease_id)
        self._held[reply.lease_id] = [
            space.leased(key) if ready else None for key, ready in zip(keys, there, strict=True)
        ]
        self._granted[request.session, request.nonce] = reply.lease_id
        return reply

    def _release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        known = self.leases & set(request.lease_ids)
        self.leases -= known
        for lease_id in request.lease_ids:
            self._reservations.pop(lease_id, None)
        for nonce in request.unheard:
            lease_id = self._granted.pop((request.session, nonce), 0)
            self.leases.discard(lease_id)
            self._reservations.pop(lease_id, None)
        self.reports += request.reports
        self.outcomes += request.requests
        self.audits += request.audits
        self._lock.notify_all()
        unknown = len(request.lease_ids) - len(known)
        return pb.ReleaseReply(released=len(known), unknown=unknown)

    def _fetch(self, request: pb.FetchRequest) -> list[pb.FetchChunk]:
        space = self._space(request.space_id)
        chunks = [
            pb.FetchChunk(
                header=pb.ChunkHeader(
                    fingerprint_digest=space.digest, block_bytes=space.layout.block_bytes
                )
            )
        ]
        keys = unpack_keys(request.keys)
        run = list(itertools.takewhile(space.ready, keys))
        for block, key in enumerate(run):
            data = space.bytes_of(space.slots[key])
            for offset in range(0, data.size, CHUNK_BYTES):
                header = pb.ChunkHeader(block=block, offset=offset)
                payload = data[offset : offset + CHUNK_BYTES].tobytes()
                chunks.append(pb.FetchChunk(header=header, payload=payload))
        end = OK if len(run) == len(keys) else pb.REASON_MISS_NEVER_STORED
        chunks.append(pb.FetchChunk(header=pb.ChunkHeader(block=len(run), reason=end)))
        return chunks

    # ---------------------------------------------------------------- writes

    def _reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        space = self._space(request.space_id)
        chain = unpack_keys(request.chain)
        part_bytes = space.layout.part_bytes
        writing = {
            key
            for one in self._reservations.values()
            if one.space is space and one.part == request.part
            for key in one.keys
        }
        offered = range(request.first_block, len(chain))
        present = [i for i in offered if request.part in space.parts.get(chain[i], ())]
        reserved = [i for i in offered if chain[i] in writing]
        wanted = [i for i in offered if i not in {*present, *reserved}]
        reply = pb.ReserveReply(
            part_bytes=part_bytes, present=len(present), reserved=len(reserved), reason=OK
        )
        room = self.staging_bytes // part_bytes
        new = [i for i in wanted if chain[i] not in space.slots][len(space.free) :]
        taken = [i for i in wanted if not new or i < new[0]]
        if len(taken) < len(wanted):
            reply.reason = pb.REASON_NO_SPACE
        if len(taken) > room:
            taken, reply.reason = taken[:room], pb.REASON_STAGING_BUSY
        if not taken:
            return reply
        offsets = [number * part_bytes for number in range(len(taken))]
        reply.lease_id = next(_ids)
        self._granted[request.session, request.nonce] = reply.lease_id
        reply.wanted, reply.offsets = convert.pack_u32(taken), convert.pack_u64(offsets)
        reply.staging_region_id = self._staging_of(request.session)[0]
        self._reservations[reply.lease_id] = Reservation(
            request.session, space, request.part, [chain[i] for i in taken], offsets
        )
        return reply

    def _staging_of(self, secret: bytes) -> tuple[int, shm.SharedRegion]:
        if secret not in self._staging:
            region = shm.create_region(self.staging_bytes, "kvstore-fake-staging")
            region.seal(shm.STAGING_SEALS)
            self._staging[secret] = next(_ids), region
        return self._staging[secret]

    def _commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        if request.durable:
            raise KVStoreError(Reason.NO_DURABLE_TIER, "a fake forgets")
        one = self._reservations.pop(request.lease_id, None)
        if one is None:
            raise KVStoreError(Reason.LEASE_UNKNOWN, "no such reservation")
        staging = self._staging_of(one.session)[1].map.u8
        part = one.space.layout.parts[one.part]
        visible = 0
        for key, offset in zip(one.keys, one.offsets, strict=True):
            slot = one.space.slots.get(key)
            if slot is None:
                slot = one.space.slots[key] = one.space.free.pop()
                one.space.region.map.generations(one.space.info.slots)[slot] += 1
            target = one.space.bytes_of(slot)[part.offset : part.offset + part.length]
            np.copyto(target, staging[offset : offset + part.length])
            one.space.parts.setdefault(key, set()).add(one.part)
            visible += one.space.ready(key)
        return pb.CommitReply(visible=visible, waiting=len(one.keys) - visible, reason=OK)

    def _abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        known = self._reservations.pop(request.lease_id, None) is not None
        return pb.AbortReply(known=known)

    def _push(self, chunks: Sequence[pb.PushChunk]) -> pb.PushReply:
        reserved = self._reserve(chunks[0].reserve)
        reply = pb.PushReply(
            present=reserved.present, reserved=reserved.reserved, reason=reserved.reason
        )
        if not reserved.lease_id:
            return reply
        wanted = convert.unpack_u32(reserved.wanted).tolist()
        at = dict(zip(wanted, convert.unpack_u64(reserved.offsets).tolist(), strict=True))
        staging = self._staging_of(chunks[0].reserve.session)[1].map.u8
        for chunk in chunks:
            if chunk.payload and chunk.header.block in at:
                start = at[chunk.header.block] + chunk.header.offset
                staging[start : start + len(chunk.payload)] = np.frombuffer(chunk.payload, np.uint8)
        if not chunks[-1].commit:
            self._reservations.pop(reserved.lease_id)
            raise KVStoreError(Reason.ABORTED, "the stream ended without commit")
        done = self._commit(
            pb.CommitRequest(session=chunks[0].reserve.session, lease_id=reserved.lease_id)
        )
        reply.stored = done.visible + done.waiting
        return reply

    def _explain(self, request: pb.ExplainRequest) -> pb.ExplainReply:
        space = self._space(request.space_id)
        reply = pb.ExplainReply(reason=OK)
        for key in unpack_keys(request.keys):
            ready = space.ready(key)
            reason = pb.REASON_HIT if ready else pb.REASON_MISS_NEVER_STORED
            tier = "host" if ready else ""
            reply.keys.append(
                pb.KeyExplanation(key=key[:4].hex(), reason=reason, tier=tier, age_s=-1.0)
            )
        return reply

    # ---------------------------------------------------------------- memory

    def dial(self) -> socket.socket:
        """The client's end of an fd socket; a thread of this store speaks on the other one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._lock:
            self._sockets.append(ours)
        threading.Thread(target=self._serve, args=(ours,), daemon=True).start()
        return theirs

    def _serve(self, sock: socket.socket) -> None:
        secret = b""
        with sock, contextlib.suppress(OSError):
            while True:
                frame, fds = shm.recv_frame(sock)
                shm.close_fds(fds)
                request = fd_pb2.FdRequest.FromString(frame)
                if request.HasField("hello"):
                    secret = request.hello.session
                elif request.HasField("fetch"):
                    send_lease(sock, request, partial(self._leased, request.fetch))
                    return
                with self._lock:
                    reply, fd = self._memory_reply(request, secret)
                if reply is not None:
                    reply.seq = request.seq
                    shm.send_frame(sock, reply.SerializeToString(), fd)
        with self._lock:
            self._end(secret)

    def _leased(self, asked: fd_pb2.FdFetch) -> list[Leased | None]:
        """What a lease holds while it lives."""
        with self._lock:
            live = asked.session in self._sessions and asked.lease_id in self.leases
            return self._held[asked.lease_id] if live else []

    def _memory_reply(
        self, request: fd_pb2.FdRequest, secret: bytes
    ) -> tuple[fd_pb2.FdReply | None, int | None]:
        kind = request.WhichOneof("request")
        if kind == "unmapped":
            self.unmapped.append(request.unmapped.region_id)
            self._lock.notify_all()
            return None, None
        if secret not in self._sessions:
            return fd_pb2.FdReply(reason=pb.REASON_PERMISSION_DENIED), None
        if kind == "hello":
            regions = [space.info for space in self._spaces.values()]
            return fd_pb2.FdReply(reason=OK, welcome=fd_pb2.FdWelcome(regions=regions)), None
        if kind == "get_staging" and secret in self._staging:
            region_id, region = self._staging[secret]
            info = fd_pb2.StagingInfo(region_id=region_id, total_bytes=region.total_bytes)
            return fd_pb2.FdReply(reason=OK, staging=info), region.fd
        space = self._spaces.get(request.get_region.region_id)
        if kind != "get_region" or space is None:
            return fd_pb2.FdReply(reason=pb.REASON_REGION_UNKNOWN), None
        return fd_pb2.FdReply(reason=OK, region=space.info), space.region.fd
