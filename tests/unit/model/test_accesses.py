"""The access log: which calls are one prompt, and what a line says and does not say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import pytest

from kvstore.model.accesses import PROMPTS_MAX, SALT_BYTES, Access, Prompts, Space, line
from kvstore.model.reasons import Reason
from kvstore.model.record import Record, RecordBuilder

SPACE = Space(b"d" * 32, 4096)
SALT = bytes(range(SALT_BYTES))


def chain(count: int, name: str = "") -> list[bytes]:
    keys = [hashlib.sha256(name.encode()).digest()]
    while len(keys) < count:
        keys.append(hashlib.sha256(keys[-1]).digest())
    return keys


def call(
    verb: str,
    keys: Sequence[bytes],
    at_s: float = 100.0,
    *,
    request_id: str = "",
    tenant: str = "default",
    space: int = 1,
    hit: int = 0,
    tokens: int = 0,
) -> Record:
    builder = RecordBuilder(verb, request_id, tenant, 0, at_s)
    builder.engine_id = "engine"
    builder.prompt(space, b"".join(keys), 16, tokens)
    if verb == "lookup":
        builder.count("tokens", 16 * len(keys), 16 * hit)
    else:
        builder.count("blocks", len(keys), hit)
    return builder.finish(Reason.HIT if hit else Reason.MISS_NEVER_STORED, 1)


def lines(*calls: Record) -> list[Access]:
    prompts = Prompts()
    return [one for record in calls if (one := prompts.note(record, SPACE)) is not None]


def test_a_request_is_one_line_however_many_calls_it_took() -> None:
    keys = chain(10)
    (one,) = lines(
        call("lookup", keys, hit=6, tokens=165),
        call("lookup", keys, 101, hit=6),
        call("acquire", keys[:4], 102, hit=4),
        call("lookup", keys[4:], 103, hit=2),
        call("acquire", keys[4:6], 103, hit=2),
        call("release", (), 103),
        call("reserve", keys, 104),
        call("reserve", keys, 105),
    )
    assert one == Access(100_000, "default", SPACE, b"".join(keys), 16, 165, 96, False)


def test_what_did_not_fit_into_one_load_is_the_same_request() -> None:
    """Loads of one moment are bounded: the engine asks for all, is given a part, and asks on."""
    keys = chain(10)
    rounds = [
        call("lookup", keys, hit=9),
        call("acquire", keys, hit=6),
        call("lookup", keys[6:], hit=3),
        call("acquire", keys[6:], hit=3),
        call("reserve", keys),
    ]
    assert len(lines(*rounds)) == 1
    assert len(lines(*rounds, *rounds)) == 2


def test_the_same_prompt_again_is_another_line() -> None:
    keys = chain(5)
    again = [call("lookup", keys), call("acquire", keys, hit=5)] * 3
    assert [one.stored for one in lines(*again)] == [False] * 3
    assert len(lines(call("lookup", keys), call("reserve", keys), call("lookup", keys))) == 2
    assert len(lines(*[call("acquire", keys, hit=5)] * 4)) == 4
    assert len(lines(call("lookup", keys, 100), call("lookup", keys, 150))) == 2


def test_requests_are_told_apart_by_their_ids() -> None:
    keys = chain(5)
    two = [call("lookup", keys, request_id="a"), call("lookup", keys, request_id="b")]
    rest = [call("acquire", keys, request_id="b"), call("acquire", keys, request_id="a")]
    assert len(lines(*two, *rest, call("reserve", keys, request_id="a"))) == 2
    assert len(lines(*two, call("lookup", keys, 105, request_id="a"), *rest)) == 2
    assert len(lines(*two, call("acquire", keys, request_id="c"))) == 3


def test_what_was_generated_is_a_line_of_its_own() -> None:
    keys = chain(8)
    got, put = lines(call("lookup", keys[:5]), call("reserve", keys), call("reserve", keys))
    assert (len(got.keys), got.stored) == (5 * 32, False)
    assert (len(put.keys), put.stored, put.hit_tokens) == (8 * 32, True, 0)
    (alone,) = lines(call("reserve", keys), call("push", keys[:3]))
    assert alone.stored


def test_engines_spaces_and_tenants_do_not_meet() -> None:
    keys = chain(5)
    calls = [
        call("lookup", keys),
        call("reserve", keys, space=2),
        call("reserve", keys, tenant="other"),
        call("reserve", keys, 2_000),
    ]
    assert [one.stored for one in lines(*calls)] == [False, True, True, True]


def test_other_calls_are_no_accesses() -> None:
    assert not lines(call("explain", chain(3)), call("lookup", ()), call("release", chain(2)))


def test_time_never_goes_back() -> None:
    calls = [call("lookup", chain(2, str(n)), at) for n, at in enumerate((100, 99.5, 101))]
    assert [one.at_ms for one in lines(*calls)] == [100_000, 100_000, 101_000]


def test_what_is_remembered_is_bounded() -> None:
    prompts = Prompts()
    first = chain(2, "first")
    prompts.note(call("lookup", first), SPACE)
    for number in range(PROMPTS_MAX):
        prompts.note(call("lookup", chain(2, str(number))), SPACE)
    assert prompts.note(call("reserve", first), SPACE) is not None
    for number in range(3_000):
        prompts.note(call("lookup", chain(1), space=number), SPACE)
    assert len(prompts._scopes) <= 1_024


def test_a_line_holds_no_key_and_no_name() -> None:
    keys = chain(6, "x")
    (one,) = lines(call("lookup", keys, tenant="customer", hit=2, tokens=100))
    text = line(one, SALT)
    fields = json.loads(text)
    assert fields | {"hash_ids": 0, "tenant": 0} == {
        "timestamp": 100_000,
        "input_length": 100,
        "output_length": 0,
        "hash_ids": 0,
        "tokens_per_block": 16,
        "block_bytes": 4096,
        "tenant": 0,
        "verb": "get",
        "hit_tokens": 32,
    }
    assert "customer" not in text
    plain = hashlib.blake2b(b"customer", digest_size=8).hexdigest()
    assert fields["tenant"] not in (hashlib.sha256(b"customer").hexdigest()[:12], plain[:12])
    for key in keys:
        words = [int.from_bytes(key[at : at + 8], order) for at in (0, 8, 16, 24)
                 for order in ("little", "big")]  # fmt: skip
        for word in words:
            assert not {word, word >> 11, word & (2**53 - 1)} & set(fields["hash_ids"])


@pytest.mark.parametrize("changed", ["salt", "tenant", "model"])
def test_ids_are_equal_within_a_salt_a_tenant_and_a_model_alone(changed: str) -> None:
    keys = chain(6)
    first, second = lines(call("lookup", keys[:4]), call("lookup", keys))
    ids = json.loads(line(first, SALT))["hash_ids"]
    assert len(set(ids)) == 4
    assert all(0 <= one < 2**53 for one in ids)
    assert json.loads(line(second, SALT))["hash_ids"][:4] == ids
    other = {
        "salt": lambda: line(first, SALT[::-1]),
        "tenant": lambda: line(first._replace(tenant="other"), SALT),
        "model": lambda: line(first._replace(space=Space(b"e" * 32, 4096)), SALT),
    }[changed]()
    assert not set(json.loads(other)["hash_ids"]) & set(ids)
