"""The gate around gRPC: who is inside, who waits, and what a child forgets."""

from __future__ import annotations

import threading

from kvstore_client.forks import ForkGate, grpc_works_here


def test_a_shut_gate_lets_nobody_in_until_it_opens() -> None:
    gate = ForkGate()
    entered = threading.Event()

    def call() -> None:
        with gate.call():
            entered.set()

    gate.shut()
    caller = threading.Thread(target=call)
    caller.start()
    assert gate.empty_within(0.0)
    assert not entered.wait(0.01)
    gate.open()
    assert entered.wait(5.0)
    caller.join(5.0)


def test_it_is_empty_when_the_last_call_has_left() -> None:
    gate = ForkGate()
    leave = threading.Event()
    inside = threading.Event()

    def call() -> None:
        with gate.call(), gate.call():  # calls within calls count as often
            inside.set()
            leave.wait(5.0)

    caller = threading.Thread(target=call)
    caller.start()
    assert inside.wait(5.0)
    gate.shut()
    assert not gate.empty_within(0.0)
    leave.set()
    assert gate.empty_within(5.0)
    gate.open()
    caller.join(5.0)


def test_a_child_forgets_who_was_inside() -> None:
    gate = ForkGate()
    with gate.call():
        gate.shut()
        gate.reset_in_child()
        assert gate.empty_within(0.0)
        with gate.call():
            assert not gate.empty_within(0.0)


def test_a_child_uses_grpc_only_where_its_fork_handlers_are_on() -> None:
    off = [{"GRPC_ENABLE_FORK_SUPPORT": value} for value in ("0", "false", "NO")]
    on = [{}, {"GRPC_ENABLE_FORK_SUPPORT": "1"}, {"GRPC_ENABLE_FORK_SUPPORT": "true"}]
    assert all(grpc_works_here(7, environ, first_pid=7) for environ in [*off, *on])
    assert all(grpc_works_here(8, environ, first_pid=7) for environ in on)
    assert not any(grpc_works_here(8, environ, first_pid=7) for environ in off)
