"""Audits on a real daemon with a real model: a healthy engine holds nothing, a block that nobody
computed holds its fingerprint until a person decides.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.model.reasons import Reason  # noqa: E402
from kvstore.model.sampling import Sampling  # noqa: E402
from kvstore_client import Client, ClientConfig  # noqa: E402
from kvstore_client.engines.prefix_cache import PrefixCache  # noqa: E402
from kvstore_client.engines.transformers import generate  # noqa: E402
from tests.daemon import Daemon  # noqa: E402
from tests.e2e.test_transformers import fingerprint, tiny, tokens  # noqa: E402
from tests.rawclient import RawAdmin  # noqa: E402

pytestmark = [pytest.mark.process, pytest.mark.torch]

Daemons = Callable[..., Daemon]
CONFIG = ClientConfig(deadline_ms=20_000)
PROMPT_TOKENS = 150
BLOCKS = 9


def audited(daemon: Daemon) -> tuple[int, int]:
    """(blocks that matched, that did not), by the daemon's metrics."""
    with urllib.request.urlopen(f"{daemon.http_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("kvstore_audited"))
    name = 'kvstore_audited_blocks_total{outcome="%s"}'
    return int(float(found[name % "match"])), int(float(found[name % "mismatch"]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_computes_what_is_stored_holds_nothing(daemons: Daemons, dtype: str) -> None:
    """Stored in one pass, computed again in two: the sums are added in another order."""
    daemon = daemons(audit__share=1.0)
    model = tiny(getattr(torch, dtype))
    with Client(daemon.data_socket, config=CONFIG) as client:
        cache = PrefixCache(client, model, fingerprint(model))
        for seed in range(4):
            ids = tokens(PROMPT_TOKENS, seed)
            restored = cache.restore(ids)
            assert restored.hit is not None
            assert not restored.hit.audit, "there is nothing to audit yet"
            cache.save(ids, generate(model, ids, None, 1).cache)
        differing = 0
        for seed in range(4):
            ids = tokens(PROMPT_TOKENS, seed)
            restored = cache.restore(ids)
            assert (restored.cache, restored.why) == (None, "AUDITED")
            half = generate(model, ids[:77], None, 1).cache
            saved = cache.save(ids, generate(model, ids, half, 1).cache)
            assert saved.compared is not None
            assert (saved.compared.blocks, saved.compared.mismatched) == (BLOCKS, 0)
            assert saved.compared.worst < 0.5, "far from what is let pass"
            differing += saved.compared.worst > 0
        assert differing, "two ways to add that never differ show nothing"
        assert audited(daemon) == (4 * BLOCKS, 0)
    with RawAdmin(daemon.admin_socket) as admin:
        assert not admin.call("Reviews").reviews


@pytest.mark.parametrize("planted", ["noise", "another prompt's block"])
def test_a_block_that_nobody_computed_holds_the_fingerprint(daemons: Daemons, planted: str) -> None:
    daemon = daemons(audit__share=1.0)
    model, ids = tiny(torch.bfloat16), tokens(PROMPT_TOKENS)
    with Client(daemon.data_socket, config=CONFIG) as client:
        cache = PrefixCache(client, model, fingerprint(model))
        space = client.space(cache.fingerprint)
        live = generate(model, ids, None, 1).cache
        cache.save(ids[: 16 * 5], live)
        other = tokens(PROMPT_TOKENS, 99)
        if planted == "noise":
            wrong: Any = np.random.default_rng(1).integers(0, 256, space.block_bytes, np.uint8)
        else:
            cache.save(other, generate(model, other, None, 1).cache)
            wrong = space.fetch(space.keys(other)[5:6]).data[0]
        keys = space.keys(ids[: 16 * 6])
        assert space.push(keys, [wrong], first_block=5).stored == 1
        restored = cache.restore(ids)
        assert restored.why == "AUDITED"
        saved = cache.save(ids, live)
        assert saved.compared is not None
        assert (saved.compared.blocks, saved.compared.first) == (6, 5)
        assert (saved.compared.mismatched, saved.compared.review_id > 0) == (1, True)
        again = cache.restore(ids)
        assert (again.cache, again.why) == (None, Reason.HELD_BY_AUDIT.name)
        assert again.hit is not None
        assert again.hit.reason is Reason.HELD_BY_AUDIT
        assert audited(daemon) == (5, 1)
    with RawAdmin(daemon.admin_socket) as admin:
        (review,) = admin.call("Reviews").reviews
        assert review.review_id == saved.compared.review_id
        assert "audit" in review.doubt


def test_only_the_share_is_audited_and_always_the_same(daemons: Daemons) -> None:
    daemon = daemons(audit__share=0.5, serve__salt="here")
    expected = Sampling(audit_share=0.5, salt=b"here")
    model = tiny(torch.float32)
    with Client(daemon.data_socket, config=CONFIG) as client:
        cache = PrefixCache(client, model, fingerprint(model))
        space = client.space(cache.fingerprint)
        sides = set()
        for seed in range(10):
            keys = space.keys(tokens(64, seed))
            space.push(keys, np.zeros((4, space.block_bytes), np.uint8))
            hits = [space.lookup(keys).audit for _ in range(2)]
            assert hits == [expected.audited(keys[-1])] * 2
            sides.add(hits[0])
        assert sides == {True, False}
