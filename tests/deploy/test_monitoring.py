"""A real Prometheus scrapes a real daemon under load across a veth: every query returns data, and
what is exported is what the page lists.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from google.protobuf.descriptor import MethodDescriptor
from PIL import Image
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvstore.model.fields import Group
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.reasons import Reason
from kvstore.wire.v1 import admin_pb2, store_pb2
from kvstore_server.counts import LATENCY_BOUNDS_S
from kvstore_server.exposition import COPIES, CORE_EVENTS, DECISIONS, tenant_label
from kvstore_server.metrics import FIELDS_MAX
from tests.deploy import metrics_page, render
from tests.deploy.prometheus_kit import (
    DAEMON_ADDRESS,
    DAEMON_PORT,
    RULES,
    Lane,
    daemon_in,
    namespaces_or_skip,
    prometheus_in,
    tool,
)
from tests.deploy.queries import DASHBOARD, ROOT
from tests.deploy.traffic import MODEL, Load
from tests.rawclient import RawClient

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.root, pytest.mark.slow]

TENANT = "orchid"
START_S = 90.0
"""torch, which stands for the GPU, is imported."""
BUCKETS = len(LATENCY_BOUNDS_S) + 3  # the last bound, sum and count
BASE_UNITS = ("_bytes", "_seconds", "_tokens", "_bytes_per_second")


class Scraped(NamedTuple):
    """What a run left. text: /metrics, seen across the veth."""

    asked: subprocess.CompletedProcess[str]
    shown: subprocess.CompletedProcess[str]
    text: str
    load: Load

    def families(self) -> dict[str, Metric]:
        """By the name that the page gives them: with `_total` for counters."""
        return {
            f"{one.name}_total" if one.type == "counter" else one.name: one
            for one in parse_text(self.text)
        }


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    tool("prometheus")
    namespaces_or_skip()
    folder = tmp_path_factory.mktemp("monitored")
    tenants = {"tenants__default__socket": "data.sock", f"tenants__{TENANT}__socket": "other.sock"}
    gpu = {"device__capacity_bytes": "16MiB", "device__driver": "torch-cpu"}
    with (
        Lane() as lane,
        daemon_in(lane, folder, **tenants, **gpu) as daemon,
        prometheus_in(lane, folder),
    ):
        daemon.start(START_S)
        with Load(daemon) as load:
            with RawClient(daemon.data_sockets[TENANT]) as client:
                client.lookup(client.open(MODEL).space_id, [bytes(32)])
            asked = lane.queries("--wait-s", "60")
            shown = lane.queries("--json", "--since", str(time.time() - 15))
            text = lane.metrics()
        yield Scraped(asked, shown, text, load)


def test_every_query_of_the_dashboard_and_the_rules_returns_data(scraped: Scraped) -> None:
    assert scraped.asked.returncode == 0, scraped.asked.stderr
    url = f"http://{DAEMON_ADDRESS}:{DAEMON_PORT}/metrics"
    assert f"scraped {url}: up" in scraped.asked.stdout
    print(scraped.asked.stdout, len(scraped.text.splitlines()), "lines of metrics")


def test_the_dashboard_is_drawn_from_that_data(scraped: Scraped, tmp_path: Path) -> None:
    assert scraped.shown.returncode == 0, scraped.shown.stderr
    out = tmp_path / "dashboard.png"
    render.draw(
        json.loads(DASHBOARD.read_text()), json.loads(scraped.shown.stdout), out, "of a test"
    )
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 1_000
    assert 50_000 < out.stat().st_size < 300_000


def test_the_load_read_what_was_committed(scraped: Scraped) -> None:
    counts = scraped.load.counts
    assert not scraped.load.errors
    assert counts["wrong"] == 0
    assert counts["verified"] > 0
    assert counts["stored"] > 0


def test_promtool_finds_nothing_wrong_with_the_metrics(scraped: Scraped) -> None:
    command = [tool("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=scraped.text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_page_lists_what_is_exported_and_nothing_else(scraped: Scraped) -> None:
    found, listed = scraped.families(), metrics_page.metrics()
    assert set(found) == set(listed)
    assert {name: one.type for name, one in found.items()} == {
        name: one.type for name, one in listed.items()
    }


def test_each_metric_has_the_labels_of_the_page(scraped: Scraped) -> None:
    listed = metrics_page.metrics()
    for name, family in scraped.families().items():
        assert family.samples, f"{name}: the load does not make it appear"
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == listed[name].labels, sample


def test_no_label_has_a_value_that_the_page_does_not_bound(scraped: Scraped) -> None:
    listed = metrics_page.labels()
    fields = {f"{group.GROUP}.{name}" for group in _groups(MODEL) for name, _ in group.values()}
    closed: dict[str, set[str]] = {
        "field": fields | {"other"},
        "reason": {reason.name for reason in Reason},
        "tenant": {"default", tenant_label(TENANT), ""},
        "tier": {"host", "disk", "device", ""},
    }
    seen: dict[str, set[str]] = {}
    for family in scraped.families().values():
        for sample in family.samples:
            assert sample.labels.get("guard", "load") == "load" or not sample.labels["tenant"]
            for label, value in sample.labels.items():
                seen.setdefault(label, set()).add(value)
    del seen["le"]
    assert set(seen) == set(listed)
    for label, values in seen.items():
        if label != "version":
            assert values <= closed.get(label, set(listed[label].values)), label
        if listed[label].at_most.isdigit():
            assert len(values) <= int(listed[label].at_most), label


def test_the_page_bounds_labels_as_the_product_does() -> None:
    listed = metrics_page.labels()
    data = {method.name.lower() for method in _methods(store_pb2, "Store")}
    admin = {f"admin_{method.name.lower()}" for method in _methods(admin_pb2, "Admin")}
    assert listed["op"].values == data | admin | {"admin_epoch"}
    assert int(listed["op"].at_most) == len(listed["op"].values)
    assert int(listed["reason"].at_most) == len(Reason)
    assert int(listed["field"].at_most) == FIELDS_MAX + 1
    assert listed["decision"].values == set(DECISIONS)
    assert listed["why"].values == set(COPIES)
    events = {value for value in listed["event"].values if not value.startswith("kvstore_")}
    assert events == set(CORE_EVENTS) | _counted("fdsocket", "fdreads", "health")
    assert int(listed["event"].at_most) == len(events)


def test_all_series_together_are_bounded() -> None:
    """By the page's bounds, with so many tenants, below what prometheus.yml takes."""

    def series(tenants: int) -> int:
        labels = metrics_page.labels()
        bounds = {n: tenants if n == "tenant" else int(one.at_most) for n, one in labels.items()}

        def of(names: Collection[str]) -> int:
            if {"guard", "tenant"} <= set(names):  # one guard alone is of a tenant
                return of(set(names) - {"guard"}) + of(set(names) - {"tenant"})
            return math.prod(bounds[name] for name in names)

        return sum(
            of(one.labels) * (BUCKETS if one.type == "histogram" else 1)
            for one in metrics_page.metrics().values()
        )

    text = (RULES / "prometheus.yml").read_text(encoding="utf-8")
    assert series(1) < 16_000
    assert series(2) - series(1) < 140
    assert series(50) < int(yaml.safe_load(text)["scrape_configs"][0]["sample_limit"])


def test_units_are_in_the_names_and_every_row_says_something() -> None:
    for one in metrics_page.metrics().values():
        assert len(one.meaning) > 8, one
        name = one.name.removesuffix("_total")
        assert (one.type == "counter") == one.name.endswith("_total"), one
        unit = one.unit.replace("bytes/s", "bytes_per_second")
        if f"_{unit}" in BASE_UNITS:
            assert name.endswith(f"_{unit}"), one
        else:
            assert not name.endswith(BASE_UNITS), one


def test_neither_models_nor_tenants_are_named(scraped: Scraped) -> None:
    for secret in (TENANT, MODEL.identity.model_name, MODEL.digest.hex()[:8]):
        assert secret not in scraped.text
    assert f'tenant="{tenant_label(TENANT)}"' in scraped.text


def _groups(model: Fingerprint) -> tuple[Group, ...]:
    return model.identity, model.geometry, model.encoding, model.placement


def _methods(module: Any, service: str) -> list[MethodDescriptor]:
    return list(module.DESCRIPTOR.services_by_name[service].methods)


def _counted(*modules: str) -> set[str]:
    """The events that a module counts, by its source: those it names, and why it closes."""
    found: set[str] = set()
    for module in modules:
        source = Path(ROOT / f"server/kvstore_server/{module}.py").read_text(encoding="utf-8")
        found |= set(re.findall(r'counts\["(\w+)"\]', source))
        if "closed_{why}" in source:
            whys = re.findall(r'\.close\(\s*"(\w+)"|self\.close, "(\w+)"', source)
            found |= {f"closed_{one or other}" for one, other in whys}
            denied = re.findall(r'_deny\([^)]*?"(\w+)"', source)
            if denied:
                found |= {"denied", "closed_denied"}
                found |= {name for why in denied for name in (why, f"closed_{why}")}
    return found
