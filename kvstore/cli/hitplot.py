"""Draws hit rates by capacity: one line a policy, the optimum dashed, one panel a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore.simulate.lab import OPTIMUM, Row


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes a PNG. OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(row.trace for row in rows))
    figure = Figure(figsize=(7, 4.5 * len(traces)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, trace in enumerate(traces, 1):
        axes = figure.add_subplot(len(traces), 1, number)
        its = [row for row in rows if row.trace == trace]
        for policy in dict.fromkeys(row.policy for row in its):
            points = sorted(
                (sum(row.size), row.figures.prefix_token_hit_rate)
                for row in its
                if row.policy == policy
            )
            axes.plot(*zip(*points, strict=True), marker="o", label=policy)
        ceiling = sorted({(sum(row.size), row.optimum_hit_rate) for row in its})
        axes.plot(*zip(*ceiling, strict=True), "k--", label=OPTIMUM)
        axes.set(xscale="log", xlabel="capacity, blocks of memory and disk", title=trace)
        axes.set(ylabel="prefix token hit rate", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png", dpi=120)
