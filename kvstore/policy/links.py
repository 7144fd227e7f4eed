"""Live estimate of one path (memory copy, disk read, network): its bandwidth and fixed latency.

Pure: the clock is an argument. One `Link` belongs to one thread (the store's loop); the mover's
threads report their measurements to it, they never touch it. `kvstore.policy.plan` reads it. Where
many transfers are under way at once, a `Meter` makes the samples.

Model: `elapsed = latency + bytes / bandwidth`. Both unknowns are moved, as logarithms, by a
normalised gradient step on `ln(elapsed / predicted)`, so that a sample corrects the term that made
the most of its time: large transfers teach the bandwidth, small ones the latency. The residual is
clipped, so one stall hardly moves the estimate; a run of clipped residuals on one side is a change
of the path, not an outlier, and opens the clip. Constant time and memory.
"""

from __future__ import annotations

import math

__all__ = ["Link", "Meter"]

CLIP = 0.3
"""Largest |ln(measured / predicted)| that one sample may contribute: about a third."""
RUN_MAX = 4
"""So many clipped residuals in a row on one side, and the path has changed."""
MEMORY_SAMPLES = 16.0
"""A sample's weight is never under 1 / this."""
LATENCY_NS_MIN = 1.0
NS_PER_BYTE_MIN = 1e-5
NS_PER_BYTE_MAX = 1e6
"""Bounds of the estimate (100 TB/s and 1 kB/s), so that a broken clock cannot run it away."""


WINDOW_TRANSFERS = 8
"""Ended transfers that make a sample while others are under way: as many as a device's readers, so
that what is half done at both ends of a sample hardly matters."""


class Link:
    """Bandwidth, fixed latency and queue of one path.

    The seed is what is assumed before the first sample (a data sheet's figure will do); it weighs
    as much as `seed_samples` samples. `then`: the path that all bytes take afterwards, as from host
    memory to the engine what was read from disk; it counts in predictions, not in samples.
    """

    __slots__ = (
        "_half_life_ns",
        "_last_ns",
        "_ns_per_byte",
        "_run",
        "_weight",
        "latency_ns",
        "moved_bytes",
        "moving_ns",
        "name",
        "predicted_ns",
        "queued_bytes",
        "samples",
        "seed_latency_ns",
        "then",
    )

    def __init__(
        self,
        name: str,
        *,
        bytes_per_second: float,
        latency_ns: float = 0.0,
        half_life_ns: int = 30_000_000_000,
        seed_samples: float = 1.0,
        then: Link | None = None,
    ) -> None:
        """`half_life_ns`: silence after which what was learnt weighs half against the next sample.

        Raises ValueError for a bandwidth that is not positive and finite, or a negative latency.
        """
        if not (0 < bytes_per_second < math.inf):
            raise ValueError(f"link {name}: bytes_per_second is {bytes_per_second}, not above 0")
        if not (0 <= latency_ns < math.inf):
            raise ValueError(f"link {name}: latency_ns is {latency_ns}, not 0 or more")
        if half_life_ns <= 0 or seed_samples < 0:
            raise ValueError(f"link {name}: half_life_ns above 0, seed_samples 0 or more")
        self.name = name
        self.then = then
        self.samples = 0
        # Of all samples: what moved, how long it took, and what was predicted just before each.
        self.moved_bytes = 0
        self.moving_ns = 0
        self.predicted_ns = 0.0
        self.queued_bytes = 0
        self.latency_ns = self.seed_latency_ns = latency_ns
        self._ns_per_byte = 1e9 / bytes_per_second
        self._weight = seed_samples
        self._half_life_ns = half_life_ns
        self._last_ns: int | None = None
        self._run = 0

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth of the path as it is now believed to be."""
        return 1e9 / self._ns_per_byte

    @property
    def last_ns(self) -> int | None:
        """When it was measured last; None: never."""
        return self._last_ns

    def observe(
        self, length_bytes: int, elapsed_ns: int, now_ns: int, *, continued: bool = False
    ) -> None:
        """Learns from what one transfer, or several of one time, took.

        `continued`: the path was busy before, so no fixed latency is in it. Samples without length
        or time say nothing and are dropped.
        """
        if length_bytes <= 0 or elapsed_ns <= 0:
            return
        self._fade(now_ns)
        # A latency of 0 could never grow again by a factor.
        latency = 0.0 if continued else max(self.latency_ns, LATENCY_NS_MIN)
        moving = length_bytes * self._ns_per_byte
        predicted = latency + moving
        self.moved_bytes += length_bytes
        self.moving_ns += elapsed_ns
        self.predicted_ns += predicted
        residual = self._clipped(math.log(elapsed_ns / predicted))
        self._weight = min(self._weight + 1.0, MEMORY_SAMPLES)
        self.samples += 1
        share_latency, share_moving = latency / predicted, moving / predicted
        step = residual / self._weight / (share_latency**2 + share_moving**2)
        self.latency_ns = max(LATENCY_NS_MIN, self.latency_ns * math.exp(step * share_latency))
        pace = self._ns_per_byte * math.exp(step * share_moving)
        self._ns_per_byte = min(max(pace, NS_PER_BYTE_MIN), NS_PER_BYTE_MAX)

    def enqueue(self, length_bytes: int) -> None:
        """Bytes that were handed to the path and are not there yet."""
        self.queued_bytes += length_bytes

    def dequeue(self, length_bytes: int) -> None:
        """The end of what `enqueue` announced, whether it went well or not."""
        assert length_bytes <= self.queued_bytes, "more bytes left the queue than entered it"
        self.queued_bytes -= length_bytes

    def ideal_ns(self, length_bytes: int) -> float:
        """The bound that no transfer beats: bytes / bandwidth, of one path after the other."""
        own_ns = length_bytes * self._ns_per_byte
        return own_ns if self.then is None else own_ns + self.then.ideal_ns(length_bytes)

    def fixed_ns(self) -> float:
        """What a transfer waits before its own first byte: latency and the queue before it."""
        own_ns = self.latency_ns + self.queued_bytes * self._ns_per_byte
        return own_ns if self.then is None else own_ns + self.then.fixed_ns()

    def predict_ns(self, length_bytes: int) -> float:
        """Time until `length_bytes` handed over now have arrived."""
        return self.fixed_ns() + self.ideal_ns(length_bytes)

    def _fade(self, now_ns: int) -> None:
        last_ns, self._last_ns = self._last_ns, now_ns
        if last_ns is not None and now_ns > last_ns:
            self._weight *= 0.5 ** ((now_ns - last_ns) / self._half_life_ns)

    def _clipped(self, residual: float) -> float:
        if abs(residual) <= CLIP:
            self._run = 0
            return residual
        side = 1 if residual > 0 else -1
        self._run = self._run + side if self._run * side > 0 else side
        if abs(self._run) >= RUN_MAX:
            # The path has changed: what was learnt before the run says little about it.
            self._weight = min(self._weight, 1.0)
            return max(-math.log(16), min(math.log(16), residual))
        return math.copysign(CLIP, residual)


class Meter:
    """Makes a link's samples where several transfers share its path: what came through in a stretch
    of time in which the path was never idle. How long one of them took says little, since nobody
    knows how many others it met.
    """

    __slots__ = ("_bytes", "_continued", "_ended", "_failed", "_link", "_since_ns", "_under_way")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._under_way = 0
        self._since_ns = 0
        self._continued = False
        self._ended = self._bytes = 0
        self._failed = False

    def begin(self, length_bytes: int, now_ns: int) -> None:
        """A transfer was handed to the path."""
        if not self._under_way:
            self._restart(now_ns, continued=False)
        self._under_way += 1
        self._link.enqueue(length_bytes)

    def end(self, length_bytes: int, ok: bool) -> None:
        """It has ended. `settle` follows when all that ended at one time are told."""
        self._under_way -= 1
        self._link.dequeue(length_bytes)
        self._ended += 1
        self._bytes += length_bytes
        self._failed = self._failed or not ok

    def settle(self, now_ns: int) -> None:
        """Makes a sample if enough has ended, or nothing is under way. What failed makes none."""
        if not self._ended or (self._under_way and self._ended < WINDOW_TRANSFERS):
            return
        if not self._failed:
            elapsed_ns = now_ns - self._since_ns
            self._link.observe(self._bytes, elapsed_ns, now_ns, continued=self._continued)
        self._restart(now_ns, continued=True)

    def _restart(self, now_ns: int, *, continued: bool) -> None:
        self._since_ns, self._continued = now_ns, continued
        self._ended = self._bytes = 0
        self._failed = False
