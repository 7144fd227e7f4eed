"""A daemon of now over a folder that an earlier one wrote."""

from __future__ import annotations

import dataclasses
import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.model.fingerprint import Fingerprint
from kvstore.model.reasons import Reason
from tests.daemon import Daemon
from tests.e2e.stage import until
from tests.golden.generate_folder import SETTINGS
from tests.rawclient import RawAdmin, RawClient, reason
from tests.unit.disk.test_golden_folder import CONTENT, GOLDEN, LMDB_FITS

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not LMDB_FITS, reason="LMDB's files are of another kind of machine"),
]


def test_clients_get_all_that_is_in_it_and_decisions_hold(
    daemons: Callable[..., Daemon], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    with tarfile.open(GOLDEN / "folder_1.tar.xz") as archive:
        archive.extractall(disk, filter="data")
    settings = {name.replace(".", "__"): value for name, value in SETTINGS.items()}
    daemon = daemons(disk__path=str(disk), **settings)
    with RawAdmin(daemon.admin_socket) as admin:
        until("it is loaded", lambda: admin.stats().tiers[1].state.startswith("ok"))
        assert admin.stats().tiers[1].blocks == CONTENT["counts"]["rows"]
        assert dict(admin.call("Spaces").epoch_floors) == CONTENT["epochs"]
        (review,) = admin.call("Reviews", all=True).reviews
        assert (review.state, review.revision, review.decided_by) == ("approved", "r9", "golden")
    for one in CONTENT["spaces"]:
        fingerprint = Fingerprint.from_dict(one["fingerprint"])
        with RawClient(daemon.data_sockets[one["tenant"]]) as client:
            assert client.open(fingerprint).space_id == one["space_id"]
            rows = client.get(one["space_id"], [bytes.fromhex(b["key"]) for b in one["blocks"]])
        sums = [hashlib.sha256(row.tobytes()).hexdigest() for row in rows if row is not None]
        assert sums == [block["sha256"] for block in one["blocks"]]
        if fingerprint.identity.weights_revision == "r9":
            identity = dataclasses.replace(fingerprint.identity, weights_revision=None)
            unnamed = dataclasses.replace(fingerprint, identity=identity)
            with RawClient(daemon.data_sockets[one["tenant"]]) as client:
                assert client.open(unnamed).space_id == one["space_id"], "the verdict holds"
    for one in CONTENT["absent"]:
        fingerprint = Fingerprint.from_dict(one["fingerprint"])
        with RawClient(daemon.data_sockets[one["tenant"]]) as client:
            answer = client.open(fingerprint)
            if one["reason"] == Reason.MISS_EPOCH_STALE.name:
                assert reason(answer.reason) is Reason.MISS_EPOCH_STALE
            else:
                keys = [bytes.fromhex(key) for key in one["keys"]]
                assert client.get(answer.space_id, keys) == [None] * len(keys)
