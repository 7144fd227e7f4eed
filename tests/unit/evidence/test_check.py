"""`kvstore report --check`: what has changed since a report was made."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from kvstore.config import load, render_toml
from kvstore.config.digest import settings_digest
from kvstore.evidence.check import Now, changed_since
from tests.unit.evidence.bench import CRITERIA, Bench, lines, recorded, start


def checked(bench: Bench, *more: str | Path, code: int) -> str:
    return bench.run("--check", bench.folder / "made.json", *more, code=code).output


Change = Callable[[Bench], None]


def _edit_records(bench: Bench) -> None:
    bench.records.write_text(bench.records.read_text().replace("held_out", "applied", 1))


def _cut_records(bench: Bench) -> None:
    bench.records.write_text(bench.records.read_text()[:-1])


def _remove_records(bench: Bench) -> None:
    bench.records.unlink()


def _edit_criteria(bench: Bench) -> None:
    bench.criteria.write_text(CRITERIA + "\n")


def _other_version(bench: Bench) -> None:
    path = bench.folder / "made.json"
    made = json.loads(path.read_text())
    made["made_with"]["numpy"] = "0.1"
    path.write_text(json.dumps(made))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_edit_records, "data: trace.jsonl"),
        (_cut_records, "data: trace.jsonl"),
        (_remove_records, "gone"),
        (_edit_criteria, "criteria: criteria.toml"),
        (_other_version, "numpy was 0.1"),
    ],
)
def test_check_names_what_changed(bench: Bench, change: Change, named: str) -> None:
    settings, rows = recorded(bench, lines(60))
    bench.report(rows, code=0)
    given = ("--criteria", bench.criteria, "--config", settings)
    assert "nothing has changed" in checked(bench, *given, code=0)
    change(bench)
    assert named in checked(bench, *given, code=1)


@pytest.mark.parametrize("packed", [False, True])
def test_lines_that_were_added_are_told_and_change_nothing(bench: Bench, packed: bool) -> None:
    """The daemon goes on recording; the last line may have been half a line."""
    settings, rows = recorded(bench, lines(60))
    if packed:
        bench.records = bench.records.with_suffix(".gz")

    def write(text: str) -> None:
        data = text.encode()
        bench.records.write_bytes(gzip.compress(data) if packed else data)

    whole = "".join(json.dumps(row) + "\n" for row in rows)
    bench.run("--criteria", bench.criteria, "--fix", code=0)
    write(whole + '{"verb": "us')
    given = ("--criteria", bench.criteria, "--records", bench.records)
    bench.run(*given, "--write", bench.folder / "made", code=0)
    check = ("--criteria", bench.criteria, "--config", settings)
    assert "newer" not in checked(bench, *check, code=0)
    write(whole + '{"verb": "usage"}\n' + whole)
    text = checked(bench, *check, code=0)
    assert "nothing has changed" in text
    assert f"{bench.records.name} has lines that are newer" in text
    write(whole.replace("held_out", "applied", 1))
    assert f"data: {bench.records.name} was" in checked(bench, *check, code=1)


def test_check_names_the_settings_that_changed(bench: Bench) -> None:
    settings, rows = recorded(bench, lines(60))
    bench.report(rows, code=0)
    settings.write_text('[serve]\nshare = 1.0\n[host]\ncapacity_bytes = "1GiB"\n')
    text = checked(bench, "--criteria", bench.criteria, "--config", settings, code=1)
    assert "setting serve.share was 0.5, is 1.0" in text
    assert 'setting host.capacity_bytes was 0, is "1GiB"' in text


CONFIG = render_toml(load(environ={}))
QUIET = Now("0.0", CONFIG, "i1", 0, {})


@pytest.mark.parametrize(
    ("now", "after_days", "named"),
    [
        (QUIET, 29, None),
        (QUIET, 31, "review: it was due by"),
        (
            QUIET._replace(mismatches=2),
            0,
            "audits: the daemon had found 0 blocks that differ, now 2",
        ),
        (QUIET._replace(reviews={"held": 1, "approved": 0}), 0, "reviews: 0 were held, now 1"),
        (QUIET._replace(version="0.1"), 0, "daemon was 0.0, is 0.1"),
    ],
)
def test_what_a_daemon_has_found_since_is_named(
    bench: Bench, now: Now, after_days: float, named: str | None
) -> None:
    rows = lines(60)
    rows[0] = start(config=CONFIG, config_digest=settings_digest(CONFIG))
    made = bench.report(rows, code=0)
    at_s = datetime.fromisoformat(made["made_at"]).timestamp() + after_days * 86_400
    changed, news = changed_since(made, bench.criteria, now, None, at_s)
    assert not news
    assert len(changed) == (named is not None)
    assert named is None or named in changed[0]


def test_what_was_found_before_the_report_is_no_change(bench: Bench) -> None:
    rows = lines(60, mismatches=1)
    rows[0] = start(config=CONFIG, config_digest=settings_digest(CONFIG))
    made = bench.report(rows, code=1)
    before = QUIET._replace(mismatches=1, reviews={"held": 1})
    assert not changed_since(made, bench.criteria, before, None, 1.0).changed
    anew = before._replace(instance="i2")
    (line,) = changed_since(made, bench.criteria, anew, None, 1.0).changed
    assert line == "audits: the daemon had found 0 blocks that differ, now 1"


def test_the_latest_start_counts_whatever_the_order_of_the_files(bench: Bench) -> None:
    late = start(config=CONFIG, config_digest=settings_digest(CONFIG))
    early = {**start(config="", config_digest="sha256:old"), "timestamp": late["timestamp"] - 1}
    made = bench.report([late, *lines(60)[1:], early], code=0)
    assert not changed_since(made, bench.criteria, QUIET, None, 1.0).changed


def test_check_says_what_it_could_not_compare(bench: Bench) -> None:
    bench.report(lines(60), code=0)
    text = checked(bench, code=1)
    assert "give --criteria FILE" in text
    assert "daemon: none answers" in text
    bench.folder.joinpath("made.json").write_text("[]")
    assert "is no report" in checked(bench, code=1)
