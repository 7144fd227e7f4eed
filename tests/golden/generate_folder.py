"""Makes the golden data folder of format 1, by a daemon of now:

    python tests/golden/generate_folder.py            says what would be in it
    python tests/golden/generate_folder.py --write    writes it

A disk tier's folder with its ledger, of two tenants and four models (one in two parts, one with two
cache groups, one without a revision that an operator vouched for), with blocks that were
invalidated, others that were stored anew after that, and an epoch that was raised. `folder_1.json`
says what is in it. Both change only together with a new format number: daemons set folders of other
formats aside. LMDB's files are those of little-endian machines of 64 bits.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "server"), str(ROOT / "client")]

from kvstore.model.fingerprint import Fingerprint  # noqa: E402
from kvstore.model.layout import layout_of  # noqa: E402
from kvstore.model.reasons import Reason  # noqa: E402
from kvstore.tiers.disk.verify import verify  # noqa: E402
from tests.daemon import make_daemon  # noqa: E402
from tests.e2e.stage import Prompt, altered, model  # noqa: E402
from tests.rawclient import RawAdmin, RawClient, reason  # noqa: E402

GOLDEN = Path(__file__).parent
ARCHIVE, CONTENT = GOLDEN / "folder_1.tar.xz", GOLDEN / "folder_1.json"
SETTINGS: dict[str, Any] = {
    "host.capacity_bytes": "16MiB",
    "host.staging_bytes": "2MiB",
    "disk.capacity_bytes": "4MiB",
    "tenants.alice.quota_bytes": "8MiB",
    "tenants.bob.quota_bytes": "8MiB",
}
GONE_AGAIN = 2
"""Blocks that are invalidated at the end of the first prompt."""


class Maker:
    """Fills a daemon, and keeps what is to be found in it."""

    def __init__(self, sockets: dict[str, str], admin: RawAdmin) -> None:
        self.spaces: list[dict[str, Any]] = []
        self.absent: list[dict[str, Any]] = []
        self._sockets = sockets
        self._admin = admin

    def put(self, prompt: Prompt, *, version: int = 0, approve: str = "") -> int:
        """Commits a prompt durably, each part by a session of its own; its space."""
        parts = layout_of(prompt.fingerprint).parts
        rows = prompt.rows(version)
        socket = self._sockets[prompt.tenant]
        ranks = [RawClient(socket, group=b"engine %d" % len(self.spaces)) for _ in parts]
        try:
            spaces = {rank.open(prompt.fingerprint).space_id for rank in ranks}
            if approve:
                (waiting,) = self._admin.call("Reviews").reviews
                said = self._admin.call(
                    "Review", review_id=waiting.review_id, approve=True, revision=approve,
                    who="golden", why="known weights",
                )  # fmt: skip
                assert (reason(said.reason), said.durable) == (Reason.OK, True), said
                spaces = {said.space_id}
            (space,) = spaces
            leases = []
            for rank, part in zip(ranks, parts, strict=True):
                reserved = rank.reserve(space, prompt.keys, part=part.index, attempt=1)
                pieces = [row[part.offset : part.offset + part.length] for row in rows]
                rank.fill(reserved, pieces)
                leases.append(reserved.lease_id)
            for rank, lease_id in zip(ranks[:-1], leases[:-1], strict=True):
                assert reason(rank.commit(lease_id).reason) is Reason.OK
            done = ranks[-1].commit(leases[-1], durable=True)
            assert (reason(done.reason), done.visible) == (Reason.OK, len(rows)), done
        finally:
            for rank in ranks:
                rank.close()
        return int(space)

    def note(self, prompt: Prompt, space: int, version: int = 0, blocks: int = -1) -> None:
        """These blocks of a prompt have to be found."""
        rows = prompt.rows(version)[: None if blocks < 0 else blocks]
        told = {"tenant": prompt.tenant, "fingerprint": prompt.fingerprint.to_dict()}
        found = [
            {"key": key.hex(), "sha256": hashlib.sha256(row.tobytes()).hexdigest()}
            for key, row in zip(prompt.keys, rows, strict=False)
        ]
        self.spaces.append({**told, "space_id": space, "blocks": found})

    def note_absent(self, prompt: Prompt, why: Reason, first: int = 0) -> None:
        """These must not be found."""
        told = {"tenant": prompt.tenant, "fingerprint": prompt.fingerprint.to_dict()}
        keys = [key.hex() for key in prompt.keys[first:]]
        self.absent.append({**told, "reason": why.name, "keys": keys})


def make(folder: Path) -> dict[str, Any]:
    """Makes a disk folder in `folder`/disk; what is in it."""
    settings = {name.replace(".", "__"): value for name, value in SETTINGS.items()}
    daemon = make_daemon(folder, disk__path=str(folder / "disk"), **settings)
    with daemon.start(), RawAdmin(daemon.admin_socket) as admin:
        maker = Maker(daemon.data_sockets, admin)
        one = model(4_096, name="one")
        first = Prompt(one, 1, 8, tenant="alice")
        kept = len(first.keys) - GONE_AGAIN
        space = maker.put(first)
        admin.call("Invalidate", space_id=space, keys=b"".join(first.keys[kept:]), why="golden")
        maker.note(first, space, blocks=kept)
        maker.note_absent(first, Reason.MISS_INVALIDATED, kept)
        again = Prompt(one, 2, 4, tenant="alice")
        maker.put(again)
        admin.call("Invalidate", space_id=space, keys=b"".join(again.keys), why="golden")
        maker.note(again, maker.put(again, version=1), version=1)
        other = Prompt(one, 1, 5, tenant="bob")
        maker.note(other, maker.put(other))
        parts = Prompt(model(16_384, name="two", ranks=2), 3, 5, tenant="alice")
        maker.note(parts, maker.put(parts))
        group = Prompt(altered(one, "geometry", cache_group="window"), 1, 3, tenant="bob")
        maker.note(group, maker.put(group))
        held = Prompt(model(8_192, name="three", revision=None), 4, 3, tenant="bob")
        vouched = maker.put(held, approve="r9")
        named = altered(held.fingerprint, "identity", weights_revision="r9")
        maker.note(_with(held, named, rows_of=held), vouched)
        old = Prompt(model(4_096, name="four"), 5, 4, tenant="alice")
        maker.put(old)
        assert admin.call("SetWeightEpoch", model_name="four", epoch=3, why="golden").durable
        maker.note_absent(old, Reason.MISS_EPOCH_STALE)
        assert daemon.stop() == 0
    report = verify(str(folder / "disk"))
    assert report.ok, report.damages
    counted = ("rows", "right", "spaces", "segments", "slots", "parents_missing")
    return {
        "spaces": maker.spaces,
        "absent": maker.absent,
        "epochs": {"four": 3},
        "folder_id": report.folder_id,
        "counts": {name: getattr(report, name) for name in counted},
        "payload_bytes": report.accounting.payload_bytes,
        "record_bytes": report.accounting.record_bytes,
    }


def _with(prompt: Prompt, fingerprint: Fingerprint, *, rows_of: Prompt) -> Prompt:
    """The same bytes, under the fingerprint that they got."""
    renamed = Prompt(fingerprint, 0, 0, tenant=prompt.tenant)
    renamed.keys = prompt.keys
    renamed.rows = rows_of.rows  # type: ignore[method-assign]
    return renamed


def pack(folder: Path) -> bytes:
    """The folder as an archive: names in order, no owners, no times."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for path in sorted(folder.rglob("*")):
            info = archive.gettarinfo(str(path), str(path.relative_to(folder)))
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            with path.open("rb") if path.is_file() else io.BytesIO() as file:
                archive.addfile(info, file)
    return packed.getvalue()


def main() -> None:
    """Says what a folder of now has in it, or writes both files."""
    with tempfile.TemporaryDirectory() as name:
        content = make(Path(name))
        packed = pack(Path(name) / "disk")
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    if sys.argv[1:] == ["--write"]:
        ARCHIVE.write_bytes(packed)
        CONTENT.write_text(text, encoding="ascii")
    else:
        print(text)
    print(f"{len(packed)} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
