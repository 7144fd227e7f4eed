"""The weights' digest: content decides, the memory of earlier digests never outlives a change."""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time
from pathlib import Path

import pytest

from kvstore_client.effective_config import INERT_FIELDS, effective_config_digest
from kvstore_client.weights import (
    PAGE_BYTES,
    SETTLED_NS,
    DigestCancelledError,
    DigestMemory,
    FileStamp,
    WeightsDigest,
    WeightsError,
    files_digest,
    weight_files,
)

SEED = 7
WAIT_S = 30.0


def later_ns() -> int:
    """A clock that runs ahead, so that files written by the test count as settled."""
    return time.time_ns() + 10 * SETTLED_NS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "model"
    home.mkdir()
    (home / "config.json").write_text('{"model_type": "llama"}')
    (home / "model.safetensors").write_bytes(random.Random(SEED).randbytes(64 * PAGE_BYTES + 17))
    return home


@pytest.fixture
def memory(tmp_path: Path) -> DigestMemory:
    return DigestMemory(tmp_path / "memory", chance=random.Random(SEED))


class Progress:
    """Counts the bytes that were hashed or recalled."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))


def digest(folder: Path, memory: DigestMemory) -> str:
    return files_digest(weight_files(folder), memory=memory, now_ns=later_ns)


def overwrite_keeping_size_and_mtime(path: Path, offset: int) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 1]))
    deadline = time.monotonic() + WAIT_S
    while True:  # the file system's clock may tick as rarely as every 10 ms
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        after = path.stat()
        if after.st_ctime_ns != status.st_ctime_ns:
            break
        assert time.monotonic() < deadline, "ctime does not move here"
    assert (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert after.st_ino == status.st_ino


def test_same_content_elsewhere_has_the_same_digest(
    folder: Path, memory: DigestMemory, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert digest(folder, memory) == digest(copy, memory)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_any_byte_of_any_file_counts(folder: Path, memory: DigestMemory, name: str) -> None:
    before = digest(folder, memory)
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 0x80]))
    assert digest(folder, memory) != before


def test_names_and_boundaries_count(folder: Path, memory: DigestMemory) -> None:
    before = digest(folder, memory)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    renamed = digest(folder, memory)
    assert renamed != before
    (folder / "modeling_custom.py").write_text("scale = 2\n")
    assert digest(folder, memory) != renamed


def test_unread_files_do_not_count(folder: Path, memory: DigestMemory) -> None:
    before = digest(folder, memory)
    (folder / "README.md").write_text("not read by an engine")
    assert digest(folder, memory) == before


def test_swapped_content_with_size_and_mtime_kept_is_noticed_by_ctime(
    folder: Path, memory: DigestMemory
) -> None:
    before = digest(folder, memory)
    # The middle of a page that no sample needs to hit: only the stamp can tell.
    overwrite_keeping_size_and_mtime(folder / "model.safetensors", 33 * PAGE_BYTES + 5)
    assert digest(folder, memory) != before


def test_swapped_content_under_an_unchanged_stamp_is_noticed_by_a_sample(
    folder: Path, memory: DigestMemory
) -> None:
    weights = folder / "model.safetensors"
    before = digest(folder, memory)
    old = memory.folder / FileStamp.of(weights.stat()).name()
    overwrite_keeping_size_and_mtime(weights, 0)
    # As on a file system whose ctime did not move: the new stamp finds what was remembered.
    old.rename(memory.folder / FileStamp.of(weights.stat()).name())
    assert digest(folder, memory) != before


def test_remembered_files_are_not_read_whole_again(folder: Path, memory: DigestMemory) -> None:
    weights = folder / "model.safetensors"
    before = digest(folder, memory)
    entry = memory.folder / FileStamp.of(weights.stat()).name()
    fields = json.loads(entry.read_bytes())
    fields["sha256"] = "ab" * 32  # proof that this entry, not the file, is what is used
    entry.write_text(json.dumps(fields))
    assert digest(folder, memory) != before


@pytest.mark.parametrize(
    "broken",
    [b"", b"{", b"[]", b'{"version": 2}', b'{"version":1,"sha256":"zz","pages":[]}', b"\xff\xfe"],
)
def test_a_broken_memory_costs_a_recomputation(
    folder: Path, memory: DigestMemory, broken: bytes
) -> None:
    before = digest(folder, memory)
    for entry in memory.folder.iterdir():
        entry.write_bytes(broken)
    assert digest(folder, memory) == before


def test_a_folder_that_others_may_write_is_not_believed(folder: Path, memory: DigestMemory) -> None:
    before = digest(folder, memory)
    for entry in memory.folder.iterdir():
        fields = json.loads(entry.read_bytes())
        entry.write_text(json.dumps({**fields, "sha256": "ab" * 32}))
    memory.folder.chmod(0o770)
    assert digest(folder, memory) == before


def test_an_unsettled_file_is_not_remembered(folder: Path, memory: DigestMemory) -> None:
    stamps = [FileStamp.of(path.stat()) for path in weight_files(folder)]
    newest_ns = max(stamp.ctime_ns for stamp in stamps)
    files_digest(weight_files(folder), memory=memory, now_ns=lambda: newest_ns + SETTLED_NS)
    newest = [stamp for stamp in stamps if stamp.ctime_ns == newest_ns]
    assert not any((memory.folder / stamp.name()).exists() for stamp in newest)
    files_digest(weight_files(folder), memory=memory, now_ns=lambda: newest_ns + SETTLED_NS + 1)
    assert all((memory.folder / stamp.name()).exists() for stamp in stamps)


def test_a_file_that_changes_while_it_is_read_has_no_digest(
    folder: Path, memory: DigestMemory
) -> None:
    weights = folder / "model.safetensors"

    def disturb(done: int, total: int) -> None:
        os.utime(weights, ns=(done, done))

    with pytest.raises(WeightsError, match="changed"):
        files_digest([weights], memory=memory, now_ns=later_ns, on_progress=disturb)


def test_no_weight_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="configure a weights revision"):
        weight_files(tmp_path)
    with pytest.raises(WeightsError, match="cannot list"):
        weight_files(tmp_path / "absent")


def test_the_background_digest_never_makes_its_owner_wait(
    folder: Path, memory: DigestMemory
) -> None:
    gate = threading.Event()

    def hold(done: int, total: int) -> None:
        gate.wait(WAIT_S)

    running = WeightsDigest(folder, memory=memory, now_ns=later_ns, on_progress=hold).start()
    assert running.result_if_ready() is None
    gate.set()
    assert running.wait(WAIT_S) == digest(folder, memory)
    assert running.result_if_ready() == digest(folder, memory)
    assert running.failure is None
    running.close()


def test_a_configured_revision_overrides_and_reads_nothing(tmp_path: Path) -> None:
    known = WeightsDigest(tmp_path / "absent", configured_revision="0123abcd").start()
    assert known.result_if_ready() == "0123abcd"
    known.close()
    with pytest.raises(ValueError, match="configured_revision"):
        WeightsDigest(tmp_path, configured_revision=" ")


def test_close_gives_up(folder: Path, memory: DigestMemory) -> None:
    entered, gate = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        entered.set()
        gate.wait(WAIT_S)

    running = WeightsDigest(folder, memory=memory, now_ns=later_ns, on_progress=hold).start()
    assert entered.wait(WAIT_S)
    running._cancelled.set()
    gate.set()
    running.close()
    assert running.result_if_ready() is None
    assert isinstance(running.failure, DigestCancelledError)


def test_a_failure_leaves_the_revision_unknown(tmp_path: Path, memory: DigestMemory) -> None:
    failing = WeightsDigest(tmp_path / "absent", memory=memory).start()
    assert failing.wait(WAIT_S) is None
    assert failing.failure is not None


def test_progress_reaches_the_total(folder: Path, memory: DigestMemory) -> None:
    total = sum(path.stat().st_size for path in weight_files(folder))
    for _ in range(2):  # hashed, then recalled
        progress = Progress()
        files_digest(weight_files(folder), memory=memory, now_ns=later_ns, on_progress=progress)
        assert progress.calls[-1] == (total, total)


BASE: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
}


def test_config_digest_ignores_order_and_inert_fields() -> None:
    expected = effective_config_digest(BASE)
    assert effective_config_digest(dict(reversed(BASE.items()))) == expected
    assert effective_config_digest({**BASE, **dict.fromkeys(INERT_FIELDS, "x")}) == expected
    rope = {"rope_type": "default", "rope_theta": 10000}
    assert effective_config_digest({**BASE, "rope_parameters": rope}) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-6},
        {"num_hidden_layers": 5},
        {"num_hidden_layers": "4"},
        {"sliding_window": 0},
        {"sliding_window": False},
        {"use_sliding_window": 0},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear"}},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "factor": 2.0}},
        {"layer_types": ["full_attentionsliding_attention"]},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"a_field_from_the_future": 1},
        {"window": math.inf},
    ],
)
def test_config_digest_tells_every_difference(change: dict[str, object]) -> None:
    assert effective_config_digest({**BASE, **change}) != effective_config_digest(BASE)


def test_config_digest_is_the_same_everywhere() -> None:
    """A golden value: a change of the encoding would orphan everything that is stored."""
    assert effective_config_digest(BASE) == (
        "sha256:1a452b2bb2f9d8e6090d455cadf7e27356ad73663641b723b6922d404244151f"
    )


@pytest.mark.parametrize(
    ("config", "error", "field"),
    [
        ({"rope": {"table": {1, 2}}}, TypeError, r"config\.rope\.table"),
        ({"rope": {1: 2}}, TypeError, r"config\.rope"),
        ({"scales": [1.5, math.nan]}, ValueError, r"config\.scales\[1\]"),
    ],
)
def test_config_digest_names_what_it_cannot_encode(
    config: dict[str, object], error: type[Exception], field: str
) -> None:
    with pytest.raises(error, match=field):
        effective_config_digest(config)
