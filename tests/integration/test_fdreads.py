"""Reads of leases over the fd socket of a real stack: whose bytes they are, and what is counted."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing

import numpy as np

from kvstore.model.reasons import Reason
from kvstore.shm import recv_frame, send_frame
from kvstore.wire.v1 import fd_pb2, store_pb2
from kvstore_client import Client, ClientConfig
from tests.e2e.stage import Prompt, model
from tests.integration.polling import within
from tests.integration.stack import Stack
from tests.rawclient import RawClient

SOON_S = 10.0
DENIED = fd_pb2.FdReply(seq=1, reason=store_pb2.REASON_PERMISSION_DENIED)


def answer(path: str, fetch: fd_pb2.FdFetch) -> fd_pb2.FdReply:
    """The first frame that a request for a read is answered."""
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.settimeout(SOON_S)
        sock.connect(f"{path}.fd")
        send_frame(sock, fd_pb2.FdRequest(seq=1, fetch=fetch).SerializeToString())
        return fd_pb2.FdReply.FromString(recv_frame(sock)[0])


def test_nobody_reads_another_ones_lease(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(tenants=("alice", "bob"))
    prompt = Prompt(model(), 5, blocks=4)
    alice, bob = stack.socket("alice"), stack.socket("bob")
    with RawClient(alice) as owner, RawClient(alice) as other, RawClient(bob) as stranger:
        space = owner.open(prompt.fingerprint).space_id
        owner.put(space, prompt.keys, prompt.rows())
        lease_id = owner.acquire(space, prompt.keys).lease_id
        wanted = {"lease_id": lease_id, "blocks": 4, "length": prompt.block_bytes}
        own = fd_pb2.FdFetch(session=owner.secret, **wanted)
        assert answer(alice, own).piece.length == 4 * prompt.block_bytes
        assert answer(alice, fd_pb2.FdFetch(session=other.secret, **wanted)) == DENIED
        assert answer(alice, fd_pb2.FdFetch(session=stranger.secret, **wanted)) == DENIED
        assert answer(bob, fd_pb2.FdFetch(session=stranger.secret, **wanted)) == DENIED
        assert answer(bob, own) == DENIED
        view = owner.acquire(space, prompt.keys, view=True)
        wanted["lease_id"] = view.lease_id
        assert answer(alice, fd_pb2.FdFetch(session=owner.secret, **wanted)) == DENIED
        owner.release(lease_id)
        assert answer(alice, own) == DENIED, "as if there had never been one"


def test_a_fetch_without_mapped_memory_is_an_acquire_and_a_report(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack()
    prompt = Prompt(model(), 6, blocks=6)
    before = stack.ask(lambda: stack.store.links[0].samples)
    config = ClientConfig(transport="stream", deadline_ms=20_000)
    with Client(stack.socket(), config=config) as client:
        space = client.space(prompt.fingerprint)
        assert space.push(prompt.keys, np.stack(prompt.rows())).stored == 6
        fetched = space.fetch(prompt.keys, all_or_nothing=True, request_id="r")
        assert (fetched.blocks, fetched.reason) == (6, Reason.OK)
        prompt.assert_right(list(fetched.data))
        assert within(SOON_S, lambda: stack.held() == (0, 0, 0))
        (record,) = stack.records("acquire")
        assert (record.asked, record.handed_on, record.request_id) == (6, 6, "r")
        assert not stack.records("fetch")
    loaded = 'kvstore_loaded_bytes_total{tenant="default"}'
    assert stack.counters()[loaded] == 6 * prompt.block_bytes
    # How long a socket takes tells nothing of copies out of memory.
    assert stack.ask(lambda: stack.store.links[0].samples) == before
