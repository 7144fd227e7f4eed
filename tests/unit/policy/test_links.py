"""`Link`: finds bandwidth and latency from samples, whatever noise and stalls come with them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.policy.links import WINDOW_NS, Link, Meter

MIB = 1 << 20
SECOND_NS = 1_000_000_000


def feed(
    link: Link,
    samples: int,
    *,
    bytes_per_second: float,
    latency_ns: float,
    rng: random.Random,
    sizes: tuple[int, ...] = (MIB,),
    noise: float = 0.0,
    stalls: float = 0.0,
    start_ns: int = 0,
) -> int:
    now_ns = start_ns
    for _ in range(samples):
        size = rng.choice(sizes)
        elapsed_ns = latency_ns + size / bytes_per_second * 1e9
        elapsed_ns *= 1 + rng.uniform(-noise, noise)
        if rng.random() < stalls:
            elapsed_ns *= rng.uniform(10, 100)
        now_ns += int(elapsed_ns)
        link.observe(size, int(elapsed_ns), now_ns)
    return now_ns


def test_the_seed_is_the_estimate_until_a_sample_comes() -> None:
    link = Link("pcie", bytes_per_second=20 * (1 << 30), latency_ns=5_000)
    assert link.bytes_per_second == 20 * (1 << 30)
    assert link.latency_ns == 5_000
    assert link.ideal_ns(8 << 30) == pytest.approx(0.4e9)
    assert link.predict_ns(8 << 30) == pytest.approx(0.4e9 + 5_000)
    assert link.samples == 0


def test_learns_a_bandwidth_that_is_far_from_the_seed() -> None:
    for true_rate in (1e8, 3e9, 2e11):
        link = Link("disk", bytes_per_second=10e9, latency_ns=1_000)
        rng = random.Random(1)
        feed(
            link, 60, bytes_per_second=true_rate, latency_ns=1_000, rng=rng, sizes=(64 * MIB,)
        )  # fmt: skip
        assert link.bytes_per_second == pytest.approx(true_rate, rel=0.02)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rate=st.floats(2e8, 5e10),
    latency_us=st.floats(20, 2_000),
    guess=st.floats(0.2, 5.0),
)
def test_predicts_every_size_under_noise_and_stalls(
    seed: int, rate: float, latency_us: float, guess: float
) -> None:
    link = Link("any", bytes_per_second=rate * guess, latency_ns=latency_us * 1e3 * guess)
    sizes = tuple(MIB << k for k in range(0, 9, 2))
    feed(
        link, 500, bytes_per_second=rate, latency_ns=latency_us * 1e3, rng=random.Random(seed),
        sizes=sizes, noise=0.1, stalls=0.05,
    )  # fmt: skip
    for size in sizes:
        truth_ns = latency_us * 1e3 + size / rate * 1e9
        assert link.predict_ns(size) == pytest.approx(truth_ns, rel=0.35)


def test_one_stall_hardly_moves_the_estimate() -> None:
    link = Link("disk", bytes_per_second=2e9)
    now_ns = feed(link, 50, bytes_per_second=2e9, latency_ns=0, rng=random.Random(2))
    before = link.bytes_per_second
    link.observe(MIB, 100 * int(MIB / 2e9 * 1e9), now_ns)
    assert before * 0.97 < link.bytes_per_second < before


def test_follows_a_lasting_change_within_a_few_samples() -> None:
    rng = random.Random(3)
    link = Link("disk", bytes_per_second=2e9)
    now_ns = feed(link, 200, bytes_per_second=2e9, latency_ns=0, rng=rng)
    feed(link, 16, bytes_per_second=2e8, latency_ns=0, rng=rng, start_ns=now_ns)
    assert link.bytes_per_second == pytest.approx(2e8, rel=0.1)


def test_three_loads_that_are_faster_than_the_path_was_prove_that_it_has_recovered() -> None:
    """Each began while nothing was under way, as a probe does; one alone is no proof."""
    link = Link("disk", bytes_per_second=1e6)
    now_ns = feed(link, 60, bytes_per_second=1e6, latency_ns=0, rng=random.Random(8))
    told = []
    for _ in range(3):
        now_ns = feed(
            link, 1, bytes_per_second=8e6, latency_ns=0, rng=random.Random(9), start_ns=now_ns
        )
        told.append(link.bytes_per_second)
    assert told[0] < 1.2e6
    assert told[-1] == pytest.approx(8e6, rel=0.2)


def test_small_transfers_teach_the_latency_not_the_bandwidth() -> None:
    link = Link("net", bytes_per_second=10e9, latency_ns=20_000)
    feed(link, 100, bytes_per_second=10e9, latency_ns=200_000, rng=random.Random(4), sizes=(4096,))
    assert link.latency_ns == pytest.approx(200_000, rel=0.05)
    assert link.bytes_per_second == pytest.approx(10e9, rel=0.1)


@pytest.mark.parametrize(
    ("rate", "latency_ns", "most_mib"),
    [(25e6, 5e6, 8), (1e9, 5e6, 16), (7e9, 3e5, 64)],
    ids=["latency-is-little", "latency-is-half", "fast-device"],
)
def test_sizes_of_one_order_tell_latency_and_bandwidth_apart(
    rate: float, latency_ns: float, most_mib: int
) -> None:
    """From a seed that is off by 40 or by 5; after a few loads, and with a stall now and then."""
    errors = []
    for seed in range(20):
        link, rng = Link("disk", bytes_per_second=1e9, latency_ns=1e6), random.Random(seed)
        sizes = tuple(MIB * n // 4 for n in range(1, 4 * most_mib))
        how = {"latency_ns": latency_ns, "rng": rng, "sizes": sizes, "noise": 0.1}
        now_ns = feed(link, 8, bytes_per_second=rate, stalls=0.0, **how)  # type: ignore[arg-type]
        for _ in range(60):
            size = rng.choice(sizes)
            truth_ns = latency_ns + size / rate * 1e9
            errors.append(abs(link.predict_ns(size) / truth_ns - 1))
            now_ns = feed(link, 1, bytes_per_second=rate, stalls=0.02, start_ns=now_ns, **how)  # type: ignore[arg-type]
    assert sorted(errors)[len(errors) * 9 // 10] < 0.2


def test_silence_makes_the_next_sample_count_more() -> None:
    def after(pause_ns: int) -> float:
        link = Link("disk", bytes_per_second=2e9, half_life_ns=10 * SECOND_NS)
        now_ns = feed(link, 100, bytes_per_second=2e9, latency_ns=0, rng=random.Random(5))
        link.observe(MIB, int(1.25 * MIB / 2e9 * 1e9), now_ns + pause_ns)
        return link.bytes_per_second

    assert 2e9 * 0.96 < after(0) < 2e9
    assert after(120 * SECOND_NS) == pytest.approx(2e9 / 1.25, rel=0.02)


@pytest.mark.parametrize("at_once", [1, 3, 8, 64])
def test_transfers_that_share_a_path_measure_it_together(at_once: int) -> None:
    """One after the other on the path, however many were handed to it at the same time."""
    link = Link("disk", bytes_per_second=1e9, latency_ns=MIB // 8)
    meter, now_ns = Meter(link), 0
    for _ in range(40):
        for _ in range(at_once):
            meter.begin(MIB, now_ns)
        now_ns += MIB // 8  # a latency that all of them share, at 8 bytes a ns
        for _ in range(at_once):
            now_ns += MIB // 8
            meter.end(MIB, True)
            meter.settle(now_ns)
    assert link.moved_bytes == 40 * at_once * MIB
    assert link.moving_ns == now_ns
    truth_ns = (1 + at_once) * MIB / 8
    assert link.predict_ns(at_once * MIB) == pytest.approx(truth_ns, rel=0.02)


def test_what_ends_in_one_turn_is_one_sample() -> None:
    link = Link("disk", bytes_per_second=8e9)
    meter = Meter(link)
    for _ in range(24):
        meter.begin(MIB, 0)
    for _ in range(20):
        meter.end(MIB, True)
    meter.settle(20 * MIB // 8)
    assert link.samples == 0, "a few milliseconds are as long as a thread may wait for a processor"
    meter.settle(WINDOW_NS)
    assert (link.samples, link.moved_bytes) == (1, 20 * MIB)
    assert link.queued_bytes == 4 * MIB
    for _ in range(4):
        meter.end(MIB, True)
    meter.settle(WINDOW_NS + 1)
    assert link.samples == 2, "what ends while nothing else is under way is a sample, however short"


def test_a_failed_transfer_measures_nothing_and_leaves_the_queue() -> None:
    link = Link("disk", bytes_per_second=8e9)
    meter = Meter(link)
    for ok in (True, False):
        meter.begin(MIB, 0)
        meter.end(MIB, ok)
    meter.settle(10**9)
    assert (link.samples, link.queued_bytes) == (0, 0)
    meter.begin(MIB, 2 * 10**9)
    meter.end(MIB, True)
    meter.settle(2 * 10**9 + MIB // 8)
    assert link.samples == 1, "the failure is forgotten"
    assert link.bytes_per_second == pytest.approx(8e9, rel=0.01)


def test_bytes_that_go_on_over_another_path_wait_for_both() -> None:
    memory = Link("host", bytes_per_second=4e9, latency_ns=1_000)
    disk = Link("disk", bytes_per_second=1e9, latency_ns=100_000, then=memory)
    assert disk.ideal_ns(1_000_000) == pytest.approx(1_250_000)
    assert disk.predict_ns(1_000_000) == pytest.approx(1_351_000)
    disk.enqueue(1_000_000)
    assert disk.predict_ns(1_000_000) == pytest.approx(2_351_000)
    disk.observe(1_000_000, 1_100_000, 1)
    assert disk.predicted_ns == pytest.approx(1_100_000), "the sample is of the disk alone"


def test_the_queue_is_waited_for_first() -> None:
    link = Link("disk", bytes_per_second=1e9, latency_ns=100_000)
    link.enqueue(500_000_000)
    assert link.queued_bytes == 500_000_000
    assert link.predict_ns(1_000_000) == pytest.approx(100_000 + 501_000_000)
    assert link.ideal_ns(1_000_000) == pytest.approx(1_000_000)
    link.dequeue(500_000_000)
    assert link.predict_ns(1_000_000) == pytest.approx(1_100_000)
    with pytest.raises(AssertionError, match="left the queue"):
        link.dequeue(1)


def test_samples_that_say_nothing_are_dropped() -> None:
    link = Link("disk", bytes_per_second=1e9)
    link.observe(0, 1_000, 1)
    link.observe(MIB, 0, 2)
    link.observe(-1, -1, 3)
    assert (link.samples, link.bytes_per_second) == (0, 1e9)


def test_a_broken_clock_cannot_run_the_estimate_away() -> None:
    link = Link("disk", bytes_per_second=1e9)
    for step in range(2_000):
        link.observe(1, 10**18, 1_000 - step)
    assert link.bytes_per_second >= 1_000
    for step in range(2_000):
        link.observe(1 << 60, 1, step)
    assert link.bytes_per_second <= 1e14 * 1.001


@pytest.mark.parametrize(
    "arguments",
    [
        {"bytes_per_second": 0.0},
        {"bytes_per_second": float("inf")},
        {"bytes_per_second": float("nan")},
        {"bytes_per_second": 1e9, "latency_ns": -1.0},
        {"bytes_per_second": 1e9, "half_life_ns": 0},
    ],
)
def test_a_seed_that_makes_no_sense_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="link disk"):
        Link("disk", **arguments)  # type: ignore[arg-type]
