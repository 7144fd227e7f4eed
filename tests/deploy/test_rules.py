"""Rules, alerts, runbooks and the dashboard, without a daemon: promtool takes them, each alert
fires and stays silent where it should, and each metric that they ask for exists.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.deploy import metrics_page
from tests.deploy.prometheus_kit import RULES, tool
from tests.deploy.queries import DASHBOARD, ROOT, Api, empty, of_panel, of_rules, panels

ALERTS = RULES / "alerts.yml"
RUNBOOKS = ROOT / "deploy/docs/alerts.md"
CASES = ROOT / "tests/deploy/rules"
PROVISIONING = ROOT / "deploy/grafana/provisioning"
OTHERS = {"up", "process_open_fds", "process_max_fds"}
"""Prometheus' own, and the process'."""


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def cases(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((CASES / name).read_text(encoding="utf-8"))[
        "tests"
    ]
    return found


def promtool(*arguments: str) -> None:
    command = [tool("promtool"), *arguments]
    done = subprocess.run(command, cwd=CASES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@functools.cache
def recorded() -> dict[str, str]:
    """Expression of each recording rule."""
    return {query.legend: query.expr for query in of_rules() if query.ref == "expression"}


def asked_for(expr: str) -> set[str]:
    """The metrics in an expression; of a recording rule those that it is made of."""
    names: set[str] = set()
    for name in re.findall(r"[a-z_]+:kvstore[a-z0-9_:]*|\b(?:kvstore|process)_\w+|\bup\b", expr):
        names |= asked_for(recorded()[name]) if ":" in name else {name}
    return names


@pytest.mark.process
def test_promtool_takes_configuration_and_rules() -> None:
    promtool("check", "config", str(RULES / "prometheus.yml"))
    promtool("check", "rules", str(RULES / "recording.yml"), str(ALERTS))


@pytest.mark.process
@pytest.mark.parametrize("name", ["firing.yml", "healthy.yml"])
def test_alerts_fire_and_stay_silent(name: str) -> None:
    promtool("test", "rules", name)


def test_every_alert_has_both_cases() -> None:
    names = [alert["alert"] for alert in alerts()]
    assert len(names) == len(set(names)) > 20
    fired = {
        case["alertname"]
        for test in cases("firing.yml")
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    silent = {
        case["alertname"]
        for test in cases("healthy.yml")
        for case in test["alert_rule_test"]
        if not case["exp_alerts"]
    }
    assert fired == silent == set(names)


def test_no_alert_is_silent_for_want_of_series() -> None:
    (healthy,) = cases("healthy.yml")
    there = {series["series"].partition("{")[0] for series in healthy["input_series"]}
    for alert in alerts():
        assert asked_for(alert["expr"]) <= there, alert["alert"]


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    text = RUNBOOKS.read_text(encoding="utf-8")
    paragraphs = dict(re.findall(r"^## (\w+)\n\n(.+?)(?=\n## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(paragraphs) == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        name, paragraph = alert["alert"], paragraphs[alert["alert"]]
        assert alert["annotations"]["runbook"] == f"deploy/docs/alerts.md#{name.lower()}"
        assert paragraph.startswith(f"*{alert['labels']['severity']}*")
        assert f"after {alert.get('for', '')}" in paragraph or "for" not in alert
        assert re.search(r"^- ", paragraph, re.MULTILINE), f"{name}: says not what to do"


def test_runbooks_name_settings_that_exist() -> None:
    sources = sorted((ROOT / "kvstore/config").glob("*.py"))
    known = "".join(path.read_text(encoding="utf-8") for path in sources)
    text = RUNBOOKS.read_text(encoding="utf-8")
    groups = "server|http|host|disk|limits|state|trace|review|tenants"
    for group, name in re.findall(rf"`({groups})\.(?:NAME\.)?([a-z_]+)`", text):
        assert re.search(rf"^    {name}: ", known, re.MULTILINE), f"{group}.{name}"


def test_every_metric_that_is_asked_for_is_listed() -> None:
    listed = set(metrics_page.metrics()) | OTHERS
    exprs = [alert["expr"] for alert in alerts()]
    exprs += [query.expr for query in of_rules() if query.ref == "expression"]
    exprs += [query.expr for panel in panels() for query in of_panel(panel)]
    for expr in exprs:
        for name in asked_for(expr):
            assert name in listed or re.sub(r"_(bucket|sum|count)$", "", name) in listed, name


def test_the_dashboard_is_what_grafana_takes() -> None:
    register_default_plugins()
    given = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    taken = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    # Grafana's own types drop what they do not know.
    assert list(_lost(given, taken, "")) == []


def test_the_dashboard_can_be_drawn() -> None:
    given = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in given["panels"]]
    titles = [panel["title"] for panel in given["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)
    taken: set[tuple[int, int]] = set()
    for panel in given["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(query["datasource"]["uid"] == "${datasource}" for query in panel["targets"])
        refs = [query.ref for query in of_panel(panel)]
        assert len(set(refs)) == len(refs)
        assert all('instance=~"$instance"' in query.expr for query in of_panel(panel))
    assert {one["name"] for one in given["templating"]["list"]} == {"datasource", "instance"}


class Deaf(Api):
    """A Prometheus that has nothing for some queries."""

    def __init__(self, deaf_to: str) -> None:
        super().__init__("http://nowhere.invalid")
        self._deaf_to = deaf_to

    def instant(self, expr: str) -> list[dict[str, Any]]:
        assert "$" not in expr
        return [] if self._deaf_to in expr else [{"metric": {}, "value": [0, "1"]}]


@pytest.mark.parametrize("metric", ["kvstore_reviews_held", "kvstore_disk_written_day_bytes"])
def test_a_query_that_returns_nothing_is_told(metric: str) -> None:
    assert empty(Deaf("no such metric"), 1.0) == []
    told = empty(Deaf(metric), 1.0)
    assert told
    assert all(metric in query.expr for query in told)


def test_grafana_is_told_of_prometheus_and_of_the_dashboard() -> None:
    (source,) = _yaml("datasources/prometheus.yml")["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    prometheus = yaml.safe_load((RULES / "prometheus.yml").read_text(encoding="utf-8"))
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    (provider,) = _yaml("dashboards/kvstore.yml")["providers"]
    assert provider["type"] == "file"


def _yaml(name: str) -> Any:
    return yaml.safe_load((PROVISIONING / name).read_text(encoding="utf-8"))


def _lost(given: Any, taken: Any, path: str) -> Iterator[str]:
    """Paths whose value is another, or gone."""
    if isinstance(given, dict) and isinstance(taken, dict):
        for name, value in given.items():
            if name in taken:
                yield from _lost(value, taken[name], f"{path}.{name}")
            elif value is not None:
                yield f"{path}.{name}"
    elif isinstance(given, list) and isinstance(taken, list) and len(given) == len(taken):
        for index, (one, other) in enumerate(zip(given, taken, strict=True)):
            yield from _lost(one, other, f"{path}[{index}]")
    elif given != taken:
        yield path
