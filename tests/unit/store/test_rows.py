"""Durable rows: answered by ticket, and never said to be durable when they are not."""

from __future__ import annotations

import json

import pytest

from kvstore.ledger import VolatileLedger
from tests.unit.store.stand import MS, SECOND, FlakyLedger, Stand


def set_epoch(stand: Stand, epoch: int, model: str = "model", wait_ns: int = SECOND) -> bool:
    """Raises the floor; whether it is durable."""

    async def decided() -> bool:
        done = stand.core.set_epoch(model, epoch, "a test", stand.clock.monotonic_ns())
        return await stand.store.durable(done.ticket, wait_ns)

    return stand.run(decided())


def floors(ledger: VolatileLedger) -> dict[str, int]:
    """The floors that a restart would find."""
    return {key.decode(): json.loads(value)["epoch"] for _, key, value in ledger.rows()}


def test_a_row_is_durable_when_the_ledger_has_it() -> None:
    ledger = FlakyLedger()
    with Stand(ledger=ledger) as stand:
        assert set_epoch(stand, 3)
        assert floors(ledger) == {"model": 3}
        assert set_epoch(stand, 2), "nothing to write: what holds is written"
        assert floors(ledger) == {"model": 3}
    with Stand(ledger=ledger) as stand:
        stand.store.restore()
        assert stand.core.epoch_floors() == {"model": 3}


def test_a_volatile_ledger_makes_nothing_durable() -> None:
    with Stand() as stand:
        assert not set_epoch(stand, 3)
        assert not set_epoch(stand, 3)
        assert stand.core.epoch_floors() == {"model": 3}


def test_a_row_that_cannot_be_written_is_not_durable_and_is_not_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = FlakyLedger()
    with Stand(ledger=ledger) as stand:
        ledger.broken = True
        assert not set_epoch(stand, 3)
        assert stand.core.epoch_floors() == {"model": 3}, "it holds all the same"
        assert "state.path" in caplog.text
        assert not set_epoch(stand, 3), "nothing new to write, but it is still not durable"
        ledger.broken = False
        assert set_epoch(stand, 3), "said again, it is written"
        assert floors(ledger) == {"model": 3}


def test_what_was_kept_is_written_by_itself_once_the_ledger_works_again() -> None:
    ledger = FlakyLedger()
    with Stand(ledger=ledger) as stand:
        ledger.broken = True
        assert not set_epoch(stand, 3)
        tried = ledger.calls
        for _ in range(20):
            stand.pass_time(100 * MS)
        assert ledger.calls == tried + 1, "every two seconds, not at every tick"
        ledger.broken = False
        for _ in range(20):
            stand.pass_time(100 * MS)
        assert floors(ledger) == {"model": 3}
        assert not stand.busy()


def test_a_durable_commit_works_again_with_the_ledger() -> None:
    ledger = FlakyLedger()
    with Stand(ledger=ledger) as stand:
        ledger.broken = True
        assert not set_epoch(stand, 3)

        async def settled() -> bool:
            return await stand.store._rows.settled(SECOND)

        assert not stand.run(settled())
        ledger.broken = False
        assert stand.run(settled()), "without another row that takes them along"
        assert floors(ledger) == {"model": 3}


def test_what_was_kept_is_written_with_the_next_row() -> None:
    ledger = FlakyLedger()
    with Stand(ledger=ledger) as stand:
        ledger.broken = True
        assert not set_epoch(stand, 3)
        assert not set_epoch(stand, 4)
        assert not set_epoch(stand, 1, "other")
        ledger.broken = False
        assert set_epoch(stand, 1, "third")
        assert floors(ledger) == {"model": 4, "other": 1, "third": 1}


def test_a_slow_ledger_is_waited_for_until_the_deadline() -> None:
    ledger = FlakyLedger()
    with Stand(ledger=ledger) as stand:
        stand.pool.held = True
        start_ns = stand.clock.monotonic_ns()
        assert not set_epoch(stand, 3, wait_ns=2 * SECOND)
        assert stand.clock.monotonic_ns() - start_ns == pytest.approx(2 * SECOND, abs=MS)
        assert stand.busy()
        stand.pool.held = False
        stand.pool.step()
        stand.settle()
        assert not stand.busy()
        assert floors(ledger) == {"model": 3}
        assert stand.core.books.tickets == {}


def test_rows_that_come_while_one_is_written_go_together() -> None:
    ledger = FlakyLedger()
    with Stand(ledger=ledger) as stand:
        stand.pool.held = True

        async def raised(model: str) -> bool:
            done = stand.core.set_epoch(model, 1, "", stand.clock.monotonic_ns())
            return await stand.store.durable(done.ticket, SECOND)

        tasks = [stand.begin(raised(f"model {index}")) for index in range(5)]
        assert ledger.calls == 0
        stand.pool.step()
        stand.settle()
        assert (ledger.calls, [task.done() for task in tasks]) == (1, [True] + [False] * 4)
        stand.pool.step()
        stand.settle()
        assert ledger.calls == 2
        assert [task.result() for task in tasks] == [True] * 5


def test_a_durable_commit_waits_for_its_own_rows_however_many_others_come() -> None:
    ledger = FlakyLedger()
    with Stand(ledger=ledger) as stand:
        stand.pool.held = True

        async def settled(model: str) -> bool:
            stand.core.set_epoch(model, 1, "", stand.clock.monotonic_ns())
            stand.store.run_effects()
            return await stand.store._rows.settled(SECOND)

        tasks = [stand.begin(settled("first")), stand.begin(settled("second"))]
        for number in range(3):
            stand.core.set_epoch(f"other {number}", 1, "", stand.clock.monotonic_ns())
            stand.store.run_effects()
            stand.pool.step()
            stand.settle()
            assert [task.done() for task in tasks] == [True, number > 0]
        assert [task.result() for task in tasks] == [True, True]
        assert stand.busy(), "the last one's is out"


def test_a_caller_who_is_gone_stops_no_row() -> None:
    ledger = FlakyLedger()
    with Stand(ledger=ledger) as stand:
        stand.pool.held = True

        async def raised() -> bool:
            done = stand.core.set_epoch("model", 1, "", stand.clock.monotonic_ns())
            return await stand.store.durable(done.ticket, SECOND)

        task = stand.begin(raised())
        task.cancel()
        stand.settle()
        assert task.cancelled()
        stand.pool.step()
        stand.settle()
        assert floors(ledger) == {"model": 1}
        assert not stand.busy()
