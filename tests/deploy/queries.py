"""Runs every query of the dashboard and every recording rule through a Prometheus' HTTP API; one
that returns nothing fails.

    python -m tests.deploy.queries --url http://127.0.0.1:9090 --scrape-s 15 --wait-s 60

As JSON (`--json`) it prints the panels with what each query returned, over the time since
`--since` if that is given: that is what the picture of the dashboard is drawn from.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.integration.polling import within

ROOT = Path(__file__).resolve().parent.parent.parent
DASHBOARD = ROOT / "deploy/grafana/kvstore.json"
RECORDING = ROOT / "deploy/prometheus/recording.yml"
CALL_S = 10.0
POINTS = 240
"""Of a range: as many as a panel is wide in pixels, or so."""


class Query(NamedTuple):
    """One query. panel: its title, or "recording rules"."""

    panel: str
    ref: str
    expr: str
    legend: str


def panels(dashboard: Path = DASHBOARD) -> list[dict[str, Any]]:
    """The panels that show something, as they are in the file."""
    found: list[dict[str, Any]] = json.loads(dashboard.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def of_panel(panel: dict[str, Any]) -> list[Query]:
    return [
        Query(panel["title"], one["refId"], one["expr"], one["legendFormat"])
        for one in panel["targets"]
    ]


def of_rules(rules: Path = RECORDING) -> Iterator[Query]:
    """Each rule's expression, and the series that it should have left."""
    for group in yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield Query("recording rules", "expression", rule["expr"], rule["record"])
            yield Query("recording rules", "recorded", rule["record"], rule["record"])


def filled(expr: str, scrape_s: float) -> str:
    """With Grafana's variables as it would fill them in for all daemons: $__rate_interval is four
    scrapes.
    """
    return expr.replace("$__rate_interval", f"{max(1, round(4 * scrape_s))}s").replace(
        "$instance", ".*"
    )


class Api:
    """A Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def get(self, path: str, **params: object) -> Any:
        """`data` of the answer. Raises OSError, and ValueError with what Prometheus says."""
        query = urllib.parse.urlencode({name: str(value) for name, value in params.items()})
        try:
            with urllib.request.urlopen(f"{self._url}{path}?{query}", timeout=CALL_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{params}: {error.read().decode(errors='replace')}") from None

    def instant(self, expr: str) -> list[dict[str, Any]]:
        """The series that have a number now."""
        found: list[dict[str, Any]] = self.get("/api/v1/query", query=expr)["result"]
        return [one for one in found if one["value"][1] != "NaN"]

    def over(self, expr: str, since: float, until: float) -> list[dict[str, Any]]:
        """The series of a range; times in s."""
        step = max(1.0, (until - since) / POINTS)
        found: list[dict[str, Any]] = self.get(
            "/api/v1/query_range", query=expr, start=since, end=until, step=step
        )["result"]
        return found

    def targets(self) -> dict[str, str]:
        """Health by the URL that is scraped."""
        found = self.get("/api/v1/targets", state="active")["activeTargets"]
        return {one["scrapeUrl"]: one["health"] for one in found}

    def now(self) -> float:
        """Prometheus' own clock, in s."""
        return float(self.get("/api/v1/query", query="time()")["result"][0])


def empty(api: Api, scrape_s: float) -> list[Query]:
    """The queries that return nothing."""
    asked = [query for panel in panels() for query in of_panel(panel)] + list(of_rules())
    return [query for query in asked if not api.instant(filled(query.expr, scrape_s))]


def shown(api: Api, scrape_s: float, since: float) -> dict[str, Any]:
    """Panels by title: for each query its legend and the series of the time since then."""
    until = api.now()
    return {
        panel["title"]: [
            {
                "legend": query.legend,
                "series": api.over(filled(query.expr, scrape_s), since, until),
            }
            for query in of_panel(panel)
        ]
        for panel in panels()
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run every query of the dashboard and rules.")
    parser.add_argument("--url", default="http://127.0.0.1:9090")
    parser.add_argument("--scrape-s", type=float, default=15.0, help="Prometheus' scrape interval")
    parser.add_argument("--wait-s", type=float, default=0.0, help="ask again for so long")
    parser.add_argument("--json", action="store_true", help="print what the panels show")
    parser.add_argument("--since", type=float, default=0.0, help="with --json, Unix time in s")
    options = parser.parse_args(arguments)
    api = Api(options.url)
    left: list[Query] = []

    def all_there() -> bool:
        try:
            left[:] = empty(api, options.scrape_s)
        except OSError as error:  # it is starting
            left[:] = [Query("Prometheus", "", options.url, str(error))]
        return not left

    within(options.wait_s, all_there)
    if options.json:
        print(json.dumps(shown(api, options.scrape_s, options.since)))
        return 0
    for query in left:
        print(f"EMPTY  {query.panel} [{query.ref}] {query.legend}: {query.expr}", file=sys.stderr)
    if left:
        return 1
    asked = sum(len(of_panel(panel)) for panel in panels())
    print(f"{asked} queries of {len(panels())} panels returned data")
    print(f"{len(list(of_rules())) // 2} recording rules returned data, and were recorded")
    for url, health in api.targets().items():
        print(f"scraped {url}: {health}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
