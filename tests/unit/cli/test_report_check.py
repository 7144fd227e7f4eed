"""`kvstore report --check` beside a daemon: what it says of its audits and reviews now."""

from __future__ import annotations

from pathlib import Path

import kvstore
from kvstore.cli import main
from kvstore.config import load, render_toml
from kvstore.config.digest import settings_digest
from kvstore.wire.v1 import admin_pb2 as pb
from tests.unit.cli.conftest import FakeAdmin, runner
from tests.unit.evidence.bench import Bench, lines, start

INSTANCE = bytes(range(16))
MISMATCHES = 'kvstore_audited_blocks_total{outcome="mismatch"}'


def checked(bench: Bench, admin: FakeAdmin, code: int) -> list[str]:
    given = ["--check", bench.folder / "made.json", "--criteria", bench.criteria]
    result = runner().invoke(
        main, ["report", *map(str, given), "--admin-socket", str(admin.socket)]
    )
    assert result.exit_code == code, result.output
    return result.stdout.splitlines()


def test_what_the_daemon_found_since_the_report_is_named(admin: FakeAdmin, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    toml = render_toml(load(environ={}))
    facts = {"config": toml, "config_digest": settings_digest(toml)}
    rows = [start(**facts, kvstore=kvstore.__version__), *lines(60)[1:]]
    bench.report(rows, code=0)
    stats = pb.StatsReply(version=kvstore.__version__, instance_id=INSTANCE)
    admin.replies = {"Config": pb.ConfigReply(toml=toml), "Stats": stats}
    assert checked(bench, admin, code=0) == ["nothing has changed"]
    assert admin.requests["Reviews"][0].all, "those that were decided, too"
    stats.counters[MISMATCHES] = 3
    reviews = [pb.ReviewInfo(state=state) for state in ("held", "rejected", "held")]
    admin.replies["Reviews"] = pb.ReviewsReply(reviews=reviews)
    assert checked(bench, admin, code=1) == [
        "audits: the daemon had found 0 blocks that differ, now 3",
        "reviews: 0 were held, now 2",
        "reviews: 0 were rejected, now 1",
    ]
