"""Live estimate of one path (memory copy, disk read, network): its bandwidth and fixed latency.

Pure: the clock is an argument. One `Link` belongs to one thread (the store's loop); the mover's
threads report their measurements to it, they never touch it. `kvstore.policy.plan` reads it. Where
many transfers are under way at once, a `Meter` makes the samples.

Model: `elapsed = latency + bytes / bandwidth`. Both unknowns are the state of a Kalman filter, so
that a sample corrects what is least certain of what it is made of: loads of several sizes tell the
two apart, loads of one size correct their sum. All its noise is relative: of a sample to its time,
of what changes between two samples to what was known of it. A residual is clipped, so one stall
hardly moves the estimate; a run of clipped residuals on one side is a change of the path, not an
outlier, and opens the clip. Constant time and memory.

On synthetic paths of 1 to 7 GB/s whose latency is not what was assumed, the 90th percentile
of the error of 60 predictions is 0.10 to 0.15; a gradient step of one common gain, which learns the
latency slowly, had 0.28 to 0.45.
"""

from __future__ import annotations

import math

__all__ = ["Link", "Meter"]

CLIP = 0.3
"""Largest |ln(measured / predicted)| that one sample may contribute: about a third."""
RUN_MAX, FAST_RUN_MAX = 4, 3
"""So many clipped residuals in a row on one side, and the path has changed. Many things make a
transfer slow, but none that began on an idle path is faster than the path is: fewer suffice.
"""
FACTOR_MAX = 16.0
"""What one sample may change, once it has."""
SAMPLE_NOISE = 0.15
"""Of a sample, as a share of its time: a standard deviation, as the next three."""
LATENCY_DRIFT = 0.05
"""How far latency moves between two samples, as a share of itself."""
PACE_DRIFT = 0.02
"""The same of bandwidth."""
LATENCY_SHARE_MIN = 0.02
"""What latency is taken for at least, of a sample's time, when its uncertainty is reckoned: from
nothing it could not grow by any share of itself."""
LATENCY_NS_MIN = 1.0
NS_PER_BYTE_MIN = 1e-5
NS_PER_BYTE_MAX = 1e6
"""Bounds of the estimate (100 TB/s and 1 kB/s), so that a broken clock cannot run it away."""


WINDOW_TRANSFERS = 8
WINDOW_NS = 100_000_000
"""What a sample takes at least while others are under way: as many transfers as a device has
readers, so that what is half done at both ends hardly matters, and so long that a thread which was
woken late does not either.
"""


class Link:
    """Bandwidth, fixed latency and queue of one path.

    The seed is what is assumed before the first sample (a data sheet's figure will do); it may be
    off by as much as it says. `then`: the path that all bytes take afterwards, as from host memory
    to the engine what was read from disk; it counts in predictions, not in samples.
    """

    __slots__ = (
        "_half_life_ns",
        "_last_ns",
        "_latency_var",
        "_mixed_var",
        "_ns_per_byte",
        "_pace_var",
        "_run",
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
        then: Link | None = None,
    ) -> None:
        """`half_life_ns`: silence after which what was learnt is half as sure, as a variance.

        Raises ValueError for a bandwidth that is not positive and finite, or a negative latency.
        """
        if not (0 < bytes_per_second < math.inf):
            raise ValueError(f"link {name}: bytes_per_second is {bytes_per_second}, not above 0")
        if not (0 <= latency_ns < math.inf):
            raise ValueError(f"link {name}: latency_ns is {latency_ns}, not 0 or more")
        if half_life_ns <= 0:
            raise ValueError(f"link {name}: half_life_ns is {half_life_ns}, not above 0")
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
        # Covariance of the two: ns^2, ns^2 a byte, ns^2 a byte^2.
        self._latency_var = latency_ns**2
        self._mixed_var = 0.0
        self._pace_var = self._ns_per_byte**2
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
        latency = 0.0 if continued else self.latency_ns
        predicted = latency + length_bytes * self._ns_per_byte
        self.moved_bytes += length_bytes
        self.moving_ns += elapsed_ns
        self.predicted_ns += predicted
        self.samples += 1
        residual = math.log(elapsed_ns / predicted)
        proven = residual < 0 and not continued
        clipped, changed = self._clipped(residual, FAST_RUN_MAX if proven else RUN_MAX)
        self._doubt(predicted, now_ns, changed)
        # The farther out, the less it says.
        doubt = 1.0 if changed or proven else max(1.0, abs(residual) / CLIP)
        noise = SAMPLE_NOISE * doubt * predicted
        excess = math.expm1(clipped) * predicted
        self._learn(0.0 if continued else 1.0, length_bytes, excess, noise)

    def _learn(self, waited: float, length_bytes: int, excess: float, noise: float) -> None:
        """One step of the filter, in ns. waited: 1, or 0 where no latency is in the sample; excess:
        over what was predicted.
        """
        of_latency = waited * self._latency_var + length_bytes * self._mixed_var
        of_pace = waited * self._mixed_var + length_bytes * self._pace_var
        unsure = waited * of_latency + length_bytes * of_pace + noise**2
        step = excess / unsure
        self.latency_ns = max(LATENCY_NS_MIN, self.latency_ns + step * of_latency)
        pace = max(self._ns_per_byte + step * of_pace, self._ns_per_byte / FACTOR_MAX)
        self._ns_per_byte = min(max(pace, NS_PER_BYTE_MIN), NS_PER_BYTE_MAX)
        self._latency_var = max(self._latency_var - of_latency**2 / unsure, 0.0)
        self._mixed_var -= of_latency * of_pace / unsure
        self._pace_var = max(self._pace_var - of_pace**2 / unsure, 0.0)

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

    def _doubt(self, predicted: float, now_ns: int, changed: bool) -> None:
        """What was known is less sure by what may have happened since. Nothing is ever less sure
        than by as much as it is.
        """
        last_ns, self._last_ns = self._last_ns, now_ns
        silent_ns = 0 if last_ns is None else max(0, now_ns - last_ns)
        faded = 2.0 ** min(silent_ns / self._half_life_ns, 64.0)
        latency_most = max(self.latency_ns, LATENCY_SHARE_MIN * predicted) ** 2
        pace_most = self._ns_per_byte**2
        latency_drift, pace_drift = (1.0, 1.0) if changed else (LATENCY_DRIFT**2, PACE_DRIFT**2)
        latency_var = faded * self._latency_var + latency_drift * latency_most
        pace_var = faded * self._pace_var + pace_drift * pace_most
        # Where a variance is cut back, what the two have in common is, too.
        latency_cut = min(1.0, latency_most / latency_var)
        pace_cut = min(1.0, pace_most / pace_var)
        self._latency_var = latency_cut * latency_var
        self._mixed_var *= faded * math.sqrt(latency_cut * pace_cut)
        self._pace_var = pace_cut * pace_var

    def _clipped(self, residual: float, run_max: int) -> tuple[float, bool]:
        """(what of it counts, whether the path has changed)."""
        if abs(residual) <= CLIP:
            self._run = 0
            return residual, False
        side = 1 if residual > 0 else -1
        self._run = self._run + side if self._run * side > 0 else side
        changed = abs(self._run) >= run_max
        most = math.log(FACTOR_MAX) if changed else CLIP
        return max(-most, min(most, residual)), changed


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
        elapsed_ns = now_ns - self._since_ns
        enough = self._ended >= WINDOW_TRANSFERS and elapsed_ns >= WINDOW_NS
        if not self._ended or (self._under_way and not enough):
            return
        if not self._failed:
            self._link.observe(self._bytes, elapsed_ns, now_ns, continued=self._continued)
        self._restart(now_ns, continued=True)

    def _restart(self, now_ns: int, *, continued: bool) -> None:
        self._since_ns, self._continued = now_ns, continued
        self._ended = self._bytes = 0
        self._failed = False
