"""Files that LMDB wrote pass; whatever is wrong with the order of one is found, by name."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from kvstore.lmdbfile import examine

PAGE = 4_096
META_AT = 16
ROOT_OF_FREE, ROOT_OF_MAIN = META_AT + 64, META_AT + 112
LAST_PAGE, TRANSACTION = META_AT + 120, META_AT + 128
"""Where these are in a root page."""


def churn(folder: Path, commits: int, seed: int, *, keys: int = 1_000) -> bytes:
    """A file with two tables, after so many commits, each of which has to leave a whole file."""
    chance = random.Random(seed)
    file = folder / "data.mdb"
    with lmdb.open(str(folder), max_dbs=2, map_size=1 << 26, sync=False) as env:
        tables = [env.open_db(name) for name in (b"a", b"b")]
        for number in range(commits):
            transaction = env.begin(write=True)
            for _ in range(chance.choice((3, 40, keys // 5))):
                key = chance.randrange(keys).to_bytes(chance.choice((2, 8)), "big")
                value = chance.randbytes(chance.choice((8, 150, 150, 3_000, 9_000)))
                table = chance.choice(tables)
                if chance.random() < 0.4:
                    transaction.delete(key, db=table)
                else:
                    transaction.put(key, value, db=table)
            if chance.random() < 0.1:
                transaction.abort()
            else:
                transaction.commit()
            assert examine(file.read_bytes()) == "", f"seed {seed}, commit {number}"
    return file.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return churn(tmp_path_factory.mktemp("whole"), 16, 7, keys=300)


def younger(data: bytes) -> int:
    """The offset of the root page that counts."""
    first, second = (struct.unpack_from("<Q", data, at + TRANSACTION)[0] for at in (0, PAGE))
    return 0 if first > second else PAGE


def pages(data: bytes, kind: int) -> list[int]:
    """Offsets of all pages of a kind, in use or not."""
    found = range(2 * PAGE, len(data), PAGE)
    return [at for at in found if struct.unpack_from("<H", data, at + 10)[0] == kind]


def put(data: bytes, offset: int, layout: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(layout, changed, offset, value)
    return bytes(changed)


# ---------------------------------------------------------------- whole files


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_lmdb_wrote_is_whole(tmp_path: Path, seed: int) -> None:
    churn(tmp_path, 25, seed)


def test_a_new_file_and_a_compacted_one_are_whole(tmp_path: Path, whole: bytes) -> None:
    with lmdb.open(str(tmp_path), max_dbs=2) as env:
        assert examine((tmp_path / "data.mdb").read_bytes()) == ""
        with env.begin(write=True) as transaction:
            transaction.put(b"key", b"value")
        assert examine((tmp_path / "data.mdb").read_bytes()) == ""
    (tmp_path / "data.mdb").write_bytes(whole)
    (tmp_path / "compact").mkdir()
    with lmdb.open(str(tmp_path), max_dbs=2, map_size=1 << 26) as env:
        env.copy(str(tmp_path / "compact"), compact=True)
    assert examine((tmp_path / "compact" / "data.mdb").read_bytes()) == ""


def alike(folder: Path, *, shuffled: bool) -> bytes:
    """A file whose nodes are all of one size, written in the order of their keys or in none."""
    keys = [number.to_bytes(8, "big") for number in range(700)]
    if shuffled:
        random.Random(5).shuffle(keys)
    with lmdb.open(str(folder), max_dbs=1, map_size=1 << 26, sync=False) as env:
        table = env.open_db(b"rows")
        for first in range(0, len(keys), 100):
            with env.begin(write=True) as transaction:
                for key in keys[first : first + 100]:
                    transaction.put(key, key * 10, db=table)
                if shuffled:
                    transaction.delete(keys[first], db=table)
    return (folder / "data.mdb").read_bytes()


@pytest.mark.parametrize("shuffled", [False, True])
def test_nodes_of_one_size_are_looked_at_as_closely(tmp_path: Path, shuffled: bool) -> None:
    data = alike(tmp_path, shuffled=shuffled)
    assert examine(data) == ""
    leaves = [
        at for at in sorted(reachable(data)) if struct.unpack_from("<H", data, at + 10)[0] == 2
    ]
    seen = set()
    for page in leaves:
        lower, upper = struct.unpack_from("<HH", data, page + 12)
        places = struct.unpack_from(f"<{(lower - 16) // 2}H", data, page + 16)
        if len(places) < 3:
            continue  # of the main tree
        seen.add(page)
        low = page + min(places[1:-1])  # a node in the middle
        other = page + max(places[1:-1])
        damages = {
            "longer": put(data, low, "<H", 82),
            "shorter": put(data, low, "<H", 77),
            "above 64 KiB": put(data, low + 2, "<H", 1),
            "flags": put(data, low + 4, "<H", 1),
            "key": put(data, low + 6, "<H", 6),
            "named twice": put(data, page + 18, "<H", places[0]),
            "between two": put(data, page + 18, "<H", places[1] + 2),
            "one less": put(data, page + 12, "<H", lower - 2),
            "upper": put(data, page + 14, "<H", upper + 96),
            "exchanged": put(put(data, page + 16, "<H", places[1]), page + 18, "<H", places[0]),
            "equal": data[: low + 8] + data[other + 8 : other + 16] + data[low + 16 :],
            "a later one": put(data, low + 8, ">Q", 1 << 40),
            "a sooner one": put(data, other + 8, ">Q", 0),
        }
        for name, damaged in damages.items():
            assert examine(damaged), f"{name}, page {page // PAGE}"
        if len(seen) == 6:
            break
    assert len(seen) == 6


# ---------------------------------------------------------------- damage by name


def older_root(data: bytes) -> bytes:
    """The younger root's number is lower than it was: LMDB would go by the older one."""
    at = younger(data) + TRANSACTION
    return put(data, at, "<Q", struct.unpack_from("<Q", data, at)[0] - 4)


def younger_root(data: bytes) -> bytes:
    """The older root's number is higher than it was."""
    at = PAGE - younger(data) + TRANSACTION
    return put(data, at, "<Q", struct.unpack_from("<Q", data, at)[0] + 2)


def root_elsewhere(data: bytes) -> bytes:
    """To the root of an earlier state, which is whole, too."""
    other = PAGE - younger(data) + ROOT_OF_MAIN
    return put(data, younger(data) + ROOT_OF_MAIN, "<Q", struct.unpack_from("<Q", data, other)[0])


def fewer_keys(data: bytes) -> bytes:
    """A leaf hides its last key."""
    changed = bytearray(data)
    for at in pages(data, 2):
        lower = struct.unpack_from("<H", data, at + 12)[0]
        struct.pack_into("<H", changed, at + 12, lower - 2)
    return bytes(changed)


def keys_exchanged(data: bytes) -> bytes:
    """Two keys of each leaf in each other's place: a search finds neither."""
    changed = bytearray(data)
    for at in pages(data, 2):
        if struct.unpack_from("<H", data, at + 12)[0] > 20:
            changed[at + 16 : at + 20] = data[at + 18 : at + 20] + data[at + 16 : at + 18]
    return bytes(changed)


def child_elsewhere(data: bytes) -> bytes:
    """A branch names one page twice."""
    changed = bytearray(data)
    for at in pages(data, 1):
        first, second = struct.unpack_from("<HH", data, at + 16)
        changed[at + first : at + first + 6] = data[at + second : at + second + 6]
    return bytes(changed)


def cut(data: bytes) -> bytes:
    return data[: -PAGE * 2]


def larger(data: bytes) -> bytes:
    """The root counts a page more, as when a longer state was lost."""
    at = younger(data) + LAST_PAGE
    return put(data + bytes(PAGE), at, "<Q", struct.unpack_from("<Q", data, at)[0] + 1)


@pytest.mark.parametrize(
    ("damage", "reasons"),
    [
        (older_root, {"roots"}),
        (younger_root, {"roots"}),
        (root_elsewhere, {"page-used-twice", "counts"}),
        (fewer_keys, {"node"}),
        (keys_exchanged, {"key-order"}),
        (child_elsewhere, {"page-used-twice", "key-order"}),
        (cut, {"truncated"}),
        (larger, {"lost-pages"}),
        (lambda data: data[:100], {"truncated"}),
        (lambda data: b"not ours" * 2_000, {"no-root"}),
        (lambda data: data[:PAGE] + bytes(PAGE) + data[2 * PAGE :], {"no-root"}),
    ],
)
def test_what_is_out_of_order_is_found(
    whole: bytes, damage: Callable[[bytes], bytes], reasons: set[str]
) -> None:
    assert examine(damage(whole)) in reasons


def reachable(data: bytes) -> set[int]:
    """Offsets of the branches and leaves of all trees."""
    root = younger(data)
    left = [struct.unpack_from("<Q", data, root + at)[0] for at in (ROOT_OF_FREE, ROOT_OF_MAIN)]
    found = set()
    while left:
        page = left.pop() * PAGE
        found.add(page)
        kind, lower = struct.unpack_from("<HH", data, page + 10)
        for at in struct.unpack_from(f"<{(lower - 16) // 2}H", data, page + 16):
            low, high, flags, key_bytes = struct.unpack_from("<HHHH", data, page + at)
            if kind == 1:
                left.append(low | high << 16)
            elif flags == 2:  # a table
                left += struct.unpack_from("<Q", data, page + at + 8 + key_bytes + 40)
    return found


def test_every_page_that_is_zeroed_or_exchanged_is_missed(whole: bytes) -> None:
    used = sorted(reachable(whole))
    assert len(used) > 8
    for at, other in zip(used, [*used[1:], used[0]], strict=True):
        for new in (bytes(PAGE), whole[other : other + PAGE]):
            assert examine(whole[:at] + new + whole[at + PAGE :]), f"page {at // PAGE}"


def test_no_bytes_raise_or_hang(whole: bytes) -> None:
    chance = random.Random(11)
    found = 0
    for _ in range(300):
        changed = bytearray(whole)
        for _ in range(chance.choice((1, 1, 4, 200))):
            page = chance.randrange(len(whole) // PAGE) * PAGE
            within = chance.choice((160, 64, PAGE))
            changed[page + chance.randrange(within)] = chance.randrange(256)
        length = len(changed) if chance.random() < 0.9 else chance.randrange(9_000)
        found += bool(examine(bytes(changed[:length])))
    assert found > 50
    for length in range(0, 3 * PAGE, 397):
        assert examine(whole[:length])
        examine(chance.randbytes(length))
