"""The verifying client: what may be read, what must be there, and a client that checks each answer.

    oracle = Oracle(outcome)
    with Client(daemon, oracle) as client:
        client.put(prompt, durable=True)      # a tests.e2e.stage.Prompt: keys, and their bytes
        there = client.get(prompt)            # what was wrong is in outcome by now
        client.invalidate(prompt.fingerprint, prompt.keys[4:])
    daemon.kill(); oracle.restarted(); daemon.start(); until_loaded(daemon, oracle)
    ... check_durable(client, [prompt])

The model has, for each key of a fingerprint, the versions that a read may give: those that were
committed, and those whose commit had no answer. Each put writes a version of its own, so that the
bytes of any answer tell whose they are and which write they come from. The rules:

    a read gives a version that is possible, or a miss, which is always allowed
    what was acknowledged as dropped is possible no longer, also after a restart
    what was acknowledged as durable is there, unless it was dropped since, or made room
    what is leased is there, unchanged, until the lease ends

Several clients, in several threads, may share an oracle. What is wrong goes to `outcome.wrong`,
everything else that had to hold to `outcome.failed`. A call that finds no daemon raises `Away`;
the model has learnt by then what it may have done.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import grpc

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.hits import ABSENT, PENDING
from kvstore.model.reasons import Reason
from kvstore.testing.payload import Finding
from kvstore.testing.payload import check as check_payload
from kvstore.tiers.disk.folder import ASIDE_FOLDER, INDEX_FOLDER, SEGMENTS_FOLDER
from kvstore.tiers.disk.opening import tree_bytes
from kvstore.wire import convert
from kvstore.wire.v1 import admin_pb2
from kvstore.wire.v1 import store_pb2 as pb
from tests.daemon import Daemon
from tests.e2e.stage import Prompt
from tests.rawclient import Bytes, Gone, Leased, RawAdmin, RawClient, Refused, reason
from tests.torture.base import Outcome

LATE_S = 1.0
"""A call that takes so much longer than its deadline is a failure: ten times the bound."""

BUSY = (Reason.STAGING_BUSY, Reason.NO_SPACE, Reason.LIMIT_QUEUE)
"""There is no room now: what others hold has to be let go first."""
CAPACITY_SLACK = 1.02
FOLDER_SLACK_BYTES = 64 << 10
"""That a folder may take beyond what is said: names and metadata of the file system."""

_SET_ASIDE = re.compile(r"an older content was set aside \(.*\)")
_DAMAGED = re.compile(r"\d+ damaged records within the hour: check the device")
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Away(Exception):
    """There is no daemon, or it went during the call."""


@dataclass
class Block:
    """What is known of one key, whose bytes have a version each.

    possible: a read may give them. unsettled: of those, they may yet become visible, since their
    put has not ended. hidden: nobody is given them before a restart. dropped: ever. never: they
    were not committed. drops: how often a drop was begun. committed: a put was acknowledged and not
    dropped since; durable: and as durable.
    """

    possible: set[int] = field(default_factory=set)
    unsettled: set[int] = field(default_factory=set)
    hidden: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    never: set[int] = field(default_factory=set)
    drops: int = 0
    committed: bool = False
    durable: bool = False


class Write(NamedTuple):
    """A put that is under way: the version of its bytes, and how often each key was dropped before
    it began, since nothing has to be there that was dropped meanwhile.
    """

    fingerprint: Fingerprint
    version: int
    drops: dict[bytes, int]


class Drop(NamedTuple):
    """A dropping that is under way: versions of each key that must be gone when it has ended."""

    blocks: list[tuple[Block, set[int]]]


class Oracle:
    """The model. See the module's docstring."""

    def __init__(self, outcome: Outcome, tenant: str = "default") -> None:
        self.outcome = outcome
        self.tenant = tenant
        self._guard = threading.RLock()
        self._versions = itertools.count(1)
        self._blocks: dict[bytes, dict[bytes, Block]] = {}

    # ------------------------------------------------------------------ findings

    def wrong(self, text: str) -> None:
        """Bytes that were not what was promised."""
        with self._guard:
            self.outcome.wrong.append(text)

    def failed(self, text: str) -> None:
        """Something else that had to hold."""
        with self._guard:
            self.outcome.failed.append(text)

    # ------------------------------------------------------------------ puts

    def block(self, fingerprint: Fingerprint, key: bytes) -> Block:
        """What is known of a key; made if nothing is."""
        with self._guard:
            return self._blocks.setdefault(fingerprint.digest, {}).setdefault(key, Block())

    def begin_put(self, fingerprint: Fingerprint, keys: Collection[bytes]) -> Write:
        """Before a chain of keys is sent."""
        with self._guard:
            write = Write(fingerprint, next(self._versions), {})
            for key in keys:
                block = self.block(fingerprint, key)
                block.possible.add(write.version)
                block.unsettled.add(write.version)
                write.drops[key] = block.drops
            return write

    def not_stored(self, write: Write, keys: Collection[bytes]) -> None:
        """These were not sent, or not accepted."""
        with self._guard:
            for key in keys:
                block = self.block(write.fingerprint, key)
                block.possible.discard(write.version)
                block.unsettled.discard(write.version)
                block.never.add(write.version)

    def answered(self, write: Write, keys: Collection[bytes], *, visible: bool) -> None:
        """Their commit has ended. Without this they may become visible until the daemon ends."""
        with self._guard:
            for key in keys:
                block = self.block(write.fingerprint, key)
                block.unsettled.discard(write.version)
                block.committed |= visible and block.drops == write.drops[key]

    def made_durable(self, write: Write, keys: Collection[bytes]) -> None:
        """These were acknowledged as durable: what a durable commit brought, and its ancestors."""
        with self._guard:
            for key in keys:
                block = self.block(write.fingerprint, key)
                block.durable |= bool(block.possible) and block.drops == write.drops[key]

    # ------------------------------------------------------------------ drops

    def begin_drop(self, fingerprint: Fingerprint, keys: Collection[bytes] | None = None) -> Drop:
        """Before an invalidation is sent: of these keys, or of all. Nothing has to be there any
        more, and anything may be until `end_drop`.
        """
        with self._guard:
            blocks = self._blocks.setdefault(fingerprint.digest, {})
            chosen = (
                list(blocks.values())
                if keys is None
                else [self.block(fingerprint, key) for key in keys]
            )
            for block in chosen:
                block.drops += 1
                block.committed = block.durable = False
            return Drop([(block, block.possible - block.unsettled) for block in chosen])

    def end_drop(self, drop: Drop, *, durable: bool = True) -> None:
        """It was acknowledged. durable=False: it holds until the daemon ends."""
        with self._guard:
            for block, versions in drop.blocks:
                gone = versions & block.possible
                block.possible -= gone
                (block.dropped if durable else block.hidden).update(gone)

    # ------------------------------------------------------------------ restarts

    def restarted(self) -> None:
        """The daemon has ended: no put is under way any more, and what only it had dropped may come
        back.
        """
        with self._guard:
            for blocks in self._blocks.values():
                for block in blocks.values():
                    block.unsettled.clear()
                    block.possible |= block.hidden
                    block.hidden.clear()

    def forgotten(self) -> None:
        """Nothing has to be there any more (a cold start that is allowed); what may be stays."""
        with self._guard:
            for blocks in self._blocks.values():
                for block in blocks.values():
                    block.committed = block.durable = False

    # ------------------------------------------------------------------ checks

    def check(self, prompt: Prompt, index: int, row: Bytes, also: Collection[int] = ()) -> bool:
        """Whether a block that was read is a possible one; if not it is noted. also: versions that
        were possible when the read began.
        """
        key = prompt.keys[index]
        block = self.block(prompt.fingerprint, key)
        with self._guard:
            allowed = block.possible | set(also)
            others = {
                "was dropped": (block.dropped | block.hidden) - allowed,
                "was never committed": block.never - allowed,
            }
        finding = check_payload(row, [prompt.tag(index, version) for version in allowed])
        if finding is Finding.RIGHT:
            return True
        text = finding.value
        for fate, versions in others.items():
            for version in versions:
                if check_payload(row, [prompt.tag(index, version)]) is Finding.RIGHT:
                    text = f"version {version}, which {fate}"
        self.wrong(f"block {index} ({key[:4].hex()}): {text}; possible: {sorted(allowed)}")
        return False

    def versions(self, prompt: Prompt) -> list[set[int]]:
        """What a read of each key that begins now may give."""
        with self._guard:
            return [set(self.block(prompt.fingerprint, key).possible) for key in prompt.keys]

    def is_durable(self, fingerprint: Fingerprint, key: bytes) -> bool:
        """Whether it has to be there after a restart."""
        return self.block(fingerprint, key).durable

    def is_committed(self, fingerprint: Fingerprint, key: bytes) -> bool:
        """Whether it has to be there as long as nothing makes room or ends."""
        return self.block(fingerprint, key).committed

    def durable_run(self, prompt: Prompt) -> int:
        """The leading blocks of a prompt that have to be there after a restart."""
        return _run(self.is_durable(prompt.fingerprint, key) for key in prompt.keys)

    def committed_run(self, prompt: Prompt) -> int:
        """The leading blocks that have to be there as long as nothing makes room or ends."""
        return _run(self.is_committed(prompt.fingerprint, key) for key in prompt.keys)


@dataclass
class Put:
    """What became of a put: blocks that it made visible, and durable; blocks that were there.
    reason: of the last answer.
    """

    visible: int = 0
    durable: int = 0
    present: int = 0
    reason: Reason = Reason.OK


class Client:
    """One session with a daemon, whose every answer is checked. See the module's docstring.

    deadline_s: of each call; one that takes `LATE_S` more is a failure. missed: why the last `get`
    was not given all. sent: every second read comes over the fd socket, which promises the same as
    mapped memory.
    """

    def __init__(
        self,
        daemon: Daemon,
        oracle: Oracle,
        *,
        deadline_s: float = 20.0,
        engine_id: str = "oracle",
        sent: bool = False,
    ) -> None:
        self.oracle = oracle
        self.deadline_s = deadline_s
        self.spaces: dict[bytes, int] = {}
        self.missed = Reason.OK
        self._reads = 0
        self._sent = sent
        with self._calling("Attach"):
            self.raw = RawClient(daemon.data_socket, engine_id=engine_id)
        self.admin = RawAdmin(daemon.admin_socket)
        self.raw.call_s = self.admin.call_s = deadline_s

    @contextlib.contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Around one call: no daemon is `Away`, a late answer a failure."""
        began = time.monotonic()
        try:
            yield
        except Refused as error:
            if error.code in _AWAY:
                raise Away(f"{what}: {error}") from error
            raise
        except (OSError, EOFError) as error:
            raise Away(f"{what}: {error}") from error
        finally:
            took_s = time.monotonic() - began
            if took_s > self.deadline_s + LATE_S:
                self.oracle.failed(f"{what} took {took_s:.2f} s of {self.deadline_s:.2f} s")

    def space(self, fingerprint: Fingerprint) -> int:
        """Its space; 0 if it is refused."""
        known = self.spaces.get(fingerprint.digest)
        if known is None:
            with self._calling("Open"):
                known = self.raw.open(fingerprint).space_id
            if known:
                self.spaces[fingerprint.digest] = known
        return known or 0

    # ------------------------------------------------------------------ put

    def put(self, prompt: Prompt, *, durable: bool = False, blocks: int | None = None) -> Put:
        """Puts the leading `blocks` of a prompt, all of them if None. Asks again while there is no
        room, until the deadline.
        """
        result = Put()
        space = self.space(prompt.fingerprint)
        if not space:
            result.reason = Reason.SPACE_UNKNOWN
            return result
        chain = prompt.keys[:blocks]
        write = self.oracle.begin_put(prompt.fingerprint, chain)
        unsent: set[bytes] = set(chain)
        try:
            self._put(prompt.rows(write.version), chain, space, write, result, unsent, durable)
        finally:
            self.oracle.not_stored(write, unsent)
        return result

    def abandon(self, prompt: Prompt) -> None:
        """Reserves a prompt, fills it, and never commits: nobody may ever be given it."""
        space = self.space(prompt.fingerprint)
        write = self.oracle.begin_put(prompt.fingerprint, prompt.keys)
        self.oracle.not_stored(write, prompt.keys)
        if space:
            self._reserve(prompt.rows(write.version), prompt.keys, space, 0)

    def _put(
        self,
        rows: Sequence[Bytes],
        chain: Sequence[bytes],
        space: int,
        write: Write,
        result: Put,
        unsent: set[bytes],
        durable: bool,
    ) -> None:
        first, patience_s = 0, time.monotonic() + self.deadline_s
        while first < len(chain):
            reserved = self._reserve(rows, chain, space, first, durable)
            result.reason = self._noted(write.fingerprint, reason(reserved.reason))
            result.present = reserved.present
            if reserved.lease_id:
                wanted = [int(index) for index in convert.unpack_u32(reserved.wanted)]
                first = wanted[-1] + 1 if wanted else len(chain)
                names = [chain[index] for index in wanted]
                # From here on no answer tells nothing.
                unsent.difference_update(names)
                done = self._commit(reserved.lease_id, write, names, durable)
                result.visible += done.visible
                result.reason = self._noted(write.fingerprint, reason(done.reason))
                if durable and result.reason is Reason.OK:
                    self.oracle.made_durable(write, chain[:first])
                    result.durable += done.visible
                if result.reason is not Reason.OK:
                    return
            elif result.reason in BUSY:
                if time.monotonic() > patience_s:
                    return
                with self._calling("waiting for room"):
                    self.raw.the_fd().drain(0.002)
            else:
                if durable and result.reason is Reason.OK and not reserved.reserved:
                    self.oracle.made_durable(write, chain)
                return

    def _reserve(
        self,
        rows: Sequence[Bytes],
        chain: Sequence[bytes],
        space: int,
        first: int,
        durable: bool = False,
    ) -> pb.ReserveReply:
        try:
            with self._calling("Reserve"):
                self.raw.unmap()
                reserved = self.raw.reserve(space, chain, first=first, durable=durable)
                if reserved.lease_id:
                    self.raw.fill(reserved, rows)
                return reserved
        except Refused as error:
            return pb.ReserveReply(reason=convert.reason_to_wire(_why(error)))

    def _commit(
        self, lease_id: int, write: Write, names: list[bytes], durable: bool
    ) -> pb.CommitReply:
        try:
            with self._calling("Commit"):
                done = self.raw.commit(lease_id, durable=durable)
        except Refused as error:
            done = pb.CommitReply(reason=convert.reason_to_wire(_why(error)))
        if done.reason != pb.REASON_DEADLINE_EXCEEDED:
            self.oracle.answered(write, names, visible=done.visible == len(names))
        return done

    def _noted(self, fingerprint: Fingerprint, said: Reason) -> Reason:
        """A reason; a space that is closed is opened anew by the next call."""
        if said in (Reason.SPACE_CLOSED, Reason.SPACE_UNKNOWN):
            self.spaces.pop(fingerprint.digest, None)
        return said

    # ------------------------------------------------------------------ get

    def get(self, prompt: Prompt, *, blocks: int | None = None, wanted: int = 0) -> int:
        """Reads a prompt (its leading `blocks`) and checks every byte that it is given; the leading
        blocks that were there. Asks again while there is no room for `wanted` of them.
        """
        until_s = time.monotonic() + self.deadline_s
        while True:
            there = self._get(prompt, blocks)
            if there >= wanted or self.missed not in BUSY or time.monotonic() > until_s:
                return there
            with self._calling("waiting for room"):
                self.raw.the_fd().drain(0.002)

    def _get(self, prompt: Prompt, blocks: int | None) -> int:
        keys = prompt.keys[:blocks]
        also = self.oracle.versions(prompt)
        space = self.space(prompt.fingerprint)
        if not space:
            self.missed = Reason.SPACE_UNKNOWN
            return 0
        began = time.monotonic()
        try:
            with self._calling("Acquire"):
                self.raw.unmap()
                leased = self.raw.acquire(space, keys)
        except Refused as error:
            self.missed = self._noted(prompt.fingerprint, _why(error))
            return 0
        self.missed = self._noted(prompt.fingerprint, leased.reason)
        if not leased.lease_id:
            return 0
        with self._calling("copying"):
            self._reads += 1
            sent = self._sent and not self._reads % 2
            try:
                rows = self.raw.read(leased) if sent else self.raw.copy(leased)
            except Gone:
                # Its memory may be asked for too late; while the lease lasts it has to be there.
                if (time.monotonic() - began) * 1e3 < leased.reply.ttl_ms:
                    raise
                self.missed = Reason.REGION_UNKNOWN
                self.raw.release(leased.lease_id)
                return 0
        took_ms = (time.monotonic() - began) * 1e3
        if sent and self.raw.read_end in (Reason.SPACE_CLOSED, Reason.SPACE_UNKNOWN):
            took_ms = leased.reply.ttl_ms  # closed meanwhile: nothing of it is sent any more
        found = self._checked(prompt, leased, rows, also, took_ms)
        with self._calling("Release"):
            self.raw.release(leased.lease_id)
        return _run(found)

    def lookup(self, prompt: Prompt) -> int:
        """How long a prefix is said to be held; the answer has to agree with itself."""
        space = self.space(prompt.fingerprint)
        if not space:
            return 0
        try:
            with self._calling("Lookup"):
                hit = self.raw.lookup(space, prompt.keys)
        except Refused as error:
            self._noted(prompt.fingerprint, _why(error))
            return 0
        held = _run(code not in (ABSENT, PENDING) for code in hit.tiers)
        if hit.hit_blocks != held:
            self.oracle.wrong(f"a look-up says {hit.hit_blocks} blocks, its codes say {held}")
        return int(hit.hit_blocks)

    def _checked(
        self,
        prompt: Prompt,
        leased: Leased,
        rows: Sequence[Bytes | None],
        also: Sequence[set[int]],
        took_ms: float,
    ) -> list[bool]:
        found = []
        for index, (place, row) in enumerate(zip(leased.places, rows, strict=True)):
            if row is None and place.region and took_ms < leased.reply.ttl_ms:
                self.oracle.failed(f"block {index} was overwritten under a lease")
            found.append(row is not None and self.oracle.check(prompt, index, row, also[index]))
        return found

    def note_absent(self, prompt: Prompt, index: int) -> None:
        """Notes that a block which has to be there was not, and what the daemon says of it."""
        key, missed = prompt.keys[index], self.missed
        space = self.space(prompt.fingerprint)
        with self._calling("Explain"):
            said = self.raw.explain(space, [key]).keys[0] if space else None
        where = f"{reason(said.reason).name} {said.tier}" if said is not None else "space refused"
        self.oracle.failed(
            f"block {index} ({key[:4].hex()}) is durable and was not there: "
            f"{missed.name}, explained as {where}"
        )

    # ------------------------------------------------------------------ operator's verbs

    def invalidate(self, fingerprint: Fingerprint, keys: Sequence[bytes] | None = None) -> bool:
        """Drops keys of a space, or all of it; whether it was acknowledged as for good."""
        space = self.space(fingerprint)
        drop = self.oracle.begin_drop(fingerprint, keys)
        if not space:
            return False
        if keys is None:
            self.spaces.pop(fingerprint.digest, None)
        try:
            with self._calling("Invalidate"):
                self.admin.call("Invalidate", space_id=space, keys=b"".join(keys or ()))
        except Refused as error:
            if error.reason is Reason.IO_ERROR:
                self.oracle.end_drop(drop, durable=False)
            return False
        self.oracle.end_drop(drop)
        return True

    def raise_epoch(self, fingerprints: Sequence[Fingerprint], epoch: int) -> bool:
        """Closes all spaces of a model below `epoch`; `fingerprints` are those that it concerns.
        Whether it was acknowledged as for good.
        """
        drops = [self.oracle.begin_drop(fingerprint) for fingerprint in fingerprints]
        for fingerprint in fingerprints:
            self.spaces.pop(fingerprint.digest, None)
        name = fingerprints[0].identity.model_name
        try:
            with self._calling("SetWeightEpoch"):
                done = self.admin.call("SetWeightEpoch", model_name=name, epoch=epoch)
        except Refused:
            return False
        for drop in drops:
            self.oracle.end_drop(drop, durable=done.durable)
        return bool(done.durable)

    def counters(self) -> dict[str, float]:
        """What only grows: counters of requests, and evictions of each tier."""
        with self._calling("Stats"):
            stats = self.admin.stats()
        found = {name: value for name, value in stats.counters.items() if "_total" in name}
        return {**found, **{f"evictions {tier.name}": tier.evictions for tier in stats.tiers}}

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Lets go of everything; a daemon that is away is no error."""
        with contextlib.suppress(Refused, OSError, EOFError):
            self.raw.close()
        self.admin.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_durable(client: Client, prompts: Sequence[Prompt]) -> int:
    """Reads what has to be there after a restart; what is not is noted. How many blocks were."""
    found = 0
    for prompt in prompts:
        run = client.oracle.durable_run(prompt)
        if not run:
            continue
        there = client.get(prompt, blocks=run, wanted=run)
        found += there
        if there < run:
            client.note_absent(prompt, there)
    return found


def until_loaded(daemon: Daemon, oracle: Oracle, wait_s: float = 20.0) -> float:
    """Waits until the disk tier has loaded its index: before, what it has may be missed. Seconds
    that it took; not within `wait_s` is a failure.
    """
    began = time.monotonic()
    with RawAdmin(daemon.admin_socket) as admin:
        while True:
            tiers = {tier.name: tier.state for tier in _stats(admin).tiers}
            took_s = time.monotonic() - began
            if not tiers["disk"].startswith(("opening", "loading")):
                return took_s
            if took_s > wait_s:
                oracle.failed(f"the disk tier is still {tiers['disk']} after {wait_s:.0f} s")
                return took_s
            time.sleep(0.002)


def check_quiet(
    daemon: Daemon,
    oracle: Oracle,
    *,
    capacity_bytes: int,
    damaged: bool = False,
    wait_s: float = 10.0,
) -> None:
    """Waits until nobody holds anything, then notes what of the books does not add up: with each
    other, and with what the disk tier's folder takes on its device. damaged: the tier may say that
    it has dropped damaged records.
    """
    with RawAdmin(daemon.admin_socket) as admin:
        until_s = time.monotonic() + wait_s
        while True:
            stats = _stats(admin)
            found = _unsettled(stats, damaged)
            if not found:
                break
            if time.monotonic() > until_s:
                oracle.failed(f"after {wait_s:.0f} s: {', '.join(found)}")
                return
            time.sleep(0.01)
    for said in _unequal(stats, Path(daemon.settings["disk.path"]), capacity_bytes):
        oracle.failed(f"accounting: {said}")


def _stats(admin: RawAdmin) -> admin_pb2.StatsReply:
    try:
        return admin.stats()
    except Refused as error:
        if error.code in _AWAY:
            raise Away(str(error)) from error
        raise


def _unsettled(stats: admin_pb2.StatsReply, damaged: bool) -> list[str]:
    names = ("sessions", "read_leases", "view_leases", "write_leases", "copies_in_flight")
    found = [f"{getattr(stats, name)} {name}" for name in names if getattr(stats, name)]
    found += [f"{stats.tiers[0].staging_bytes} bytes of staging"] * (
        stats.tiers[0].staging_bytes > 0
    )
    disk = next(tier for tier in stats.tiers if tier.name == "disk")
    news = [said for said in disk.state.split("; ") if not _SET_ASIDE.fullmatch(said)]
    if damaged:
        news = [said for said in news if not _DAMAGED.fullmatch(said)]
    well = not news or news[0].startswith("ok")
    if disk.used_bytes > disk.capacity_bytes:
        found.append(f"the disk uses {disk.used_bytes} of {disk.capacity_bytes} bytes")
    return found if well else [*found, f"the disk is {disk.state}"]


def _unequal(stats: admin_pb2.StatsReply, folder: Path, capacity_bytes: int) -> Iterator[str]:
    host, disk = (next(t for t in stats.tiers if t.name == name) for name in ("host", "disk"))
    for tier in (host, disk):
        if tier.used_bytes > tier.capacity_bytes:
            yield f"{tier.name} uses {tier.used_bytes} of {tier.capacity_bytes} bytes"
        if tier.block_bytes > tier.used_bytes:
            yield f"{tier.name} has {tier.block_bytes} bytes of blocks in {tier.used_bytes}"
    for name in ("used_bytes", "blocks"):
        total = sum(getattr(tenant, name) for tenant in stats.tenants)
        if total != getattr(host, name):
            yield f"tenants have {total} {name}, the host tier {getattr(host, name)}"
    taken = tree_bytes(str(folder / SEGMENTS_FOLDER))
    index = tree_bytes(str(folder / INDEX_FOLDER))
    aside = tree_bytes(str(folder / ASIDE_FOLDER))
    if taken + index + aside > capacity_bytes * CAPACITY_SLACK:
        yield f"the folder takes {taken + index + aside} of {capacity_bytes} bytes"
    if taken + index + aside > disk.used_bytes + FOLDER_SLACK_BYTES:
        yield f"the folder takes {taken + index + aside} bytes, said are {disk.used_bytes}"
    if taken < disk.block_bytes:
        yield f"segments take {taken} bytes, blocks are said to have {disk.block_bytes}"


def _why(error: Refused) -> Reason:
    """The reason of a call that ended with a status."""
    late = error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    return Reason.DEADLINE_EXCEEDED if late else error.reason


def _run(found: Sequence[bool] | Iterator[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, found))
