"""Draws the dashboard's panels from what a real Prometheus has, as a PNG.

    python -m tests.deploy.render --out deploy/grafana/dashboard.png --seconds 150

Starts a daemon with a disk tier and Prometheus, each in a network namespace of its own (root), lets
engines that verify every block work on it, restarts the daemon in the middle, and draws what the
queries in deploy/grafana/kvstore.json return. Titles, units, legends and places are the file's.
Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import itertools

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from tests.deploy.prometheus_kit import Lane, daemon_in, prometheus_in
from tests.deploy.queries import DASHBOARD, ROOT
from tests.deploy.traffic import Load

COLUMN_IN, ROW_IN = 0.68, 0.37
HEAD_IN = 0.65
DPI = 90
LEGEND_ROWS = 3
LETTER_IN = 0.066
COLOURS_MAX = 96
BACK, PAPER, INK, FAINT = "#f4f5f5", "#ffffff", "#24292e", "#8a8f94"
COLOURS = ("#3274d9", "#e0752d", "#37872d", "#a352cc", "#c4162a", "#0f8b8d", "#b08900", "#6e6e6e")
STAT_COLOURS = {"blue": "#3274d9", "green": "#37872d", "orange": "#e0752d", "red": "#c4162a"}
WARM_S = 5.0

Shown = Mapping[str, list[dict[str, Any]]]


def text_of(value: float, unit: str) -> str:
    """A number as Grafana would write it in that unit."""
    if not math.isfinite(value):
        return ""
    if unit in ("bytes", "Bps"):
        return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB")) + "/s" * (unit == "Bps")
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
            if abs(value) * factor >= 1 or name == "µs":
                return f"{value * factor:.3g} {name}" if value else "0 s"
    if unit == "ops":
        return f"{value:.3g}/s"
    return _scaled(value, 1000, ("", "K", "M", "G")) if unit == "short" else f"{value:.4g}"


def _scaled(value: float, base: int, names: Sequence[str]) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value, power = value / base, power + 1
    return f"{value:.3g} {names[power]}".strip()


def named(legend: str, labels: Mapping[str, str]) -> str:
    """A series' name, by the panel's legend."""
    for label, value in labels.items():
        legend = legend.replace(f"{{{{{label}}}}}", value)
    return legend


def draw(dashboard: Mapping[str, Any], shown: Shown, out: Path, subtitle: str) -> None:
    """Writes the picture. shown: what `tests.deploy.queries --json` prints."""
    panels = dashboard["panels"]
    rows = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in panels)
    width, height = 24 * COLUMN_IN, rows * ROW_IN + HEAD_IN
    figure = plt.figure(figsize=(width, height), facecolor=BACK)
    figure.text(0.012, 1 - 0.30 / height, dashboard["title"], size=17, weight="bold", color=INK)
    figure.text(0.012, 1 - 0.54 / height, subtitle, size=9.5, color=FAINT)
    for panel in panels:
        place = panel["gridPos"]
        left, right = place["x"] / 24, (place["x"] + place["w"]) / 24
        top = 1 - (HEAD_IN + place["y"] * ROW_IN) / height
        bottom = 1 - (HEAD_IN + (place["y"] + place["h"]) * ROW_IN) / height
        if panel["type"] == "row":
            figure.text(0.012, (top + bottom) / 2, panel["title"], size=12, weight="bold",
                        color=INK, va="center")  # fmt: skip
            continue
        _paper(figure, left, bottom, right, top, height, panel["title"])
        if panel["type"] == "stat":
            _stat(figure, left, bottom, right, top, panel, shown[panel["title"]])
            continue
        box = (
            left + 0.92 / width,
            bottom + (0.28 + 0.15 * LEGEND_ROWS) / height,
            right - left - 1.16 / width,
            top - bottom - (0.66 + 0.15 * LEGEND_ROWS) / height,
        )
        _series(figure.add_axes(box), panel, shown[panel["title"]])
    figure.savefig(out, dpi=DPI, facecolor=BACK)
    plt.close(figure)
    _lighten(out)


def _paper(figure: Any, left: float, bottom: float, right: float, top: float, height: float,
           title: str) -> None:  # fmt: skip
    gap_x, gap_y = 0.0035, 0.04 / height
    paper = Rectangle(
        (left + gap_x, bottom + gap_y),
        right - left - 2 * gap_x,
        top - bottom - 2 * gap_y,
        transform=figure.transFigure,
        facecolor=PAPER,
        edgecolor="#dcdfe2",
        linewidth=0.8,
        zorder=-1,
    )
    figure.add_artist(paper)
    figure.text(left + 0.010, top - 0.26 / height, title, size=10.5, weight="bold", color=INK)


def _stat(figure: Any, left: float, bottom: float, right: float, top: float, panel: Any,
          rows: list[dict[str, Any]]) -> None:  # fmt: skip
    defaults = panel["fieldConfig"]["defaults"]
    values = [series["values"] for row in rows for series in row["series"]]
    last = [float(v) for _, v in values[0] if math.isfinite(float(v))][-1:] if values else []
    colour = INK
    for step in defaults["thresholds"]["steps"]:
        if last and (step["value"] is None or last[0] >= step["value"]):
            colour = STAT_COLOURS[step["color"]]
    text = text_of(last[0], defaults["unit"]) if last else "no data"
    if last and defaults["unit"] == "none" and "decimals" in defaults:
        text = f"{last[0]:.{defaults['decimals']}f}"
    figure.text((left + right) / 2, bottom + (top - bottom) * 0.38, text, size=22, weight="bold",
                color=colour, ha="center", va="center")  # fmt: skip


def _series(axes: Axes, panel: Any, rows: list[dict[str, Any]]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    lines = [
        (named(row["legend"], series["metric"]), series["values"])
        for row in rows
        for series in row["series"]
    ]
    start = min((float(values[0][0]) for _, values in lines), default=0.0)
    for number, (name, values) in enumerate(lines):
        at = [float(t) - start for t, _ in values]
        height = [float(v) for _, v in values]
        step = min((b - a for a, b in itertools.pairwise(at)), default=1.0)
        for index in range(len(at) - 1, 0, -1):
            if at[index] - at[index - 1] > 1.5 * step:  # nothing was scraped: a gap, not a line
                at.insert(index, at[index - 1] + step)
                height.insert(index, math.nan)
        colour = COLOURS[number % len(COLOURS)]
        style = "-" if number < len(COLOURS) else "--"
        axes.plot(at, height, style, color=colour, linewidth=1.5, label=name)
    axes.set_ylim(bottom=0)
    if not any(float(v) > 0 for _, values in lines for _, v in values):
        axes.set_ylim(0, 1)
    axes.margins(x=0.01)
    _ticks(axes, unit)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text_of(value, unit)))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 3, 6, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    axes.tick_params(labelsize=8, colors=FAINT, length=2)
    axes.grid(color="#e4e6e8", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    width_in = panel["gridPos"]["w"] * COLUMN_IN
    longest = max((len(name) for name, _ in lines), default=1)
    columns = max(1, min(len(lines), int(width_in / (0.5 + LETTER_IN * longest))))
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.13),
        ncols=columns,
        fontsize=8,
        frameon=False,
        labelcolor=INK,
        handlelength=1.3,
        columnspacing=1.4,
        borderaxespad=0,
        labelspacing=0.25,
    )


def _ticks(axes: Axes, unit: str) -> None:
    """About four, at round numbers of the unit that is shown: bytes are counted by 1,024."""
    low, high = axes.get_ylim()
    one = 1.0
    if unit in ("bytes", "Bps"):
        one = 1024.0 ** max(0, int(math.log(max(high, 1), 1024)))
    at = [float(tick) * one for tick in MaxNLocator(4).tick_values(low / one, high / one)]
    axes.set_yticks([tick for tick in at if low <= tick <= high])


def _lighten(out: Path) -> None:
    """Few colours make a small file."""
    with Image.open(out) as picture:
        light = picture.convert("RGB").quantize(COLOURS_MAX, dither=Image.Dither.NONE)
    light.save(out, optimize=True)


def record(folder: Path, seconds: float) -> tuple[Shown, str]:
    """A run: what the panels show of it, and what it was."""
    with Lane() as lane, daemon_in(lane, folder) as daemon, prometheus_in(lane, folder):
        daemon.start()
        began = time.time()
        waiting = threading.Event()
        with Load(daemon, pause_s=0.05) as load:
            waiting.wait(WARM_S + seconds / 2)
            daemon.restart()
            waiting.wait(seconds / 2)
            got = lane.queries("--json", "--since", str(began + WARM_S))
        assert got.returncode == 0, got.stderr
        assert not load.errors, load.errors
        assert load.counts["verified"] > 0, "nothing was read"
        assert load.counts["wrong"] == 0, load.counts
    said = (
        f"{load.counts['requests']:,} requests, {load.counts['verified']:,} blocks read and"
        " verified, all right; the daemon was restarted in the middle, warm from disk"
    )
    return json.loads(got.stdout), said


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the dashboard from real data.")
    parser.add_argument("--out", type=Path, default=ROOT / "deploy/grafana/dashboard.png")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--keep", type=Path, help="also write the data, as JSON")
    parser.add_argument("--data", type=Path, help="draw this JSON instead of a new run")
    options = parser.parse_args(arguments)
    if options.data:
        shown, said = json.loads(options.data.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            shown, said = record(Path(folder), options.seconds)
    if options.keep:
        options.keep.write_text(json.dumps([shown, said]))
    draw(json.loads(DASHBOARD.read_text(encoding="utf-8")), shown, options.out, said)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes; {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
