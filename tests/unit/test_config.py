"""The three ways to give a setting agree, and every wrong one is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import (
    Settings,
    explain,
    knobs,
    load,
    parse_flags,
    parse_size,
    render_toml,
    show_size,
)
from kvstore.config.load import FIELDS, env_name
from kvstore.config.load import names as setting_names
from kvstore.model.reasons import Reason, StartError

CLEAN = {"XDG_RUNTIME_DIR": "/run/user/7"}

_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "server.runtime_dir": st.sampled_from(["/run/a", "/srv/kv store", '/q"uote\\']),
    "server.trust_folder_writers": st.booleans(),
    "server.drain_grace_s": st.floats(0, 600, allow_nan=False),
    "server.log_level": st.sampled_from(["debug", "info", "warning", "error"]),
    "server.log_format": st.sampled_from(["json", "text"]),
    "admin.socket": st.sampled_from(["admin.sock", "a/b.sock"]),
    "admin.mode": st.sampled_from(["0600", "660"]),
    "http.listen": st.sampled_from(["", "127.0.0.1:0", "[::1]:9472", "localhost:80"]),
    "tcp.listen": st.just(""),  # with it the others have to agree: see below
    "tcp.cert_file": st.sampled_from(["", "/etc/kvstore/tls.crt"]),
    "tcp.key_file": st.sampled_from(["", "/etc/kvstore/tls.key"]),
    "tcp.client_ca_file": st.sampled_from(["", "/etc/kvstore/ca.crt"]),
    "host.capacity_bytes": st.integers(0, 1 << 50),
    "host.allow_smaller": st.booleans(),
    "host.staging_bytes": st.integers(0, 1 << 40),
    "host.mlock": st.sampled_from(["auto", "off", "require"]),
    "host.huge_pages": st.sampled_from(["auto", "off"]),
    "device.capacity_bytes": st.integers(0, 1 << 50),
    "device.gpu": st.integers(0, 63),
    "device.pools": st.sampled_from(["staged", "shared_unproven"]),
    "device.driver": st.sampled_from(["cuda", "torch-cpu"]),
    "disk.path": st.sampled_from(["", "/var/lib/kvstore/disk"]),
    "disk.capacity_bytes": st.integers(0, 1 << 50),
    "disk.endurance_bytes_per_day": st.integers(0, 1 << 50),
    "limits.keys_per_call_max": st.integers(1, 1 << 20),
    "limits.sessions_max": st.integers(1, 1 << 16),
    "limits.view_bytes_per_session_max": st.integers(0, 1 << 40),
    "limits.lease_ttl_ms": st.integers(10, 3_600_000),
    "limits.concurrent_calls_max": st.integers(1, 1 << 16),
    "state.path": st.sampled_from(["", "/var/lib/kvstore"]),
    "trace.ring_records": st.integers(0, 1 << 20),
    "trace.file": st.sampled_from(["", "/var/log/kv.jsonl"]),
    "record.path": st.sampled_from(["", "/var/lib/kvstore/record"]),
    "record.capacity_bytes": st.integers(1 << 20, 1 << 50),
    "serve.share": st.floats(0, 1),
    "serve.salt": st.text("abc-", max_size=16),
    "audit.share": st.floats(0, 1),
    "policy.eviction": st.sampled_from(["lru", "hit_density"]),
    "review.ttl_hours": st.floats(0, 24 * 366, allow_nan=False),
    "guards.hold_s": st.floats(0, 3_600, allow_nan=False),
    "guards.window_s": st.floats(1, 86_400, allow_nan=False),
    "guards.samples_min": st.integers(1, 1 << 20),
    "guards.memory_free_stop_bytes": st.integers(0, 1 << 50),
    "guards.disk_free_stop_bytes": st.integers(0, 1 << 50),
    "guards.errors_stop_share": st.floats(0, 1),
    "guards.corrupt_stop_share": st.floats(0, 1),
    "guards.load_stop_ratio": st.floats(0, 100),
    "guards.held_stop": st.integers(0, 1 << 20),
    "tenants.alice.socket": st.sampled_from(["", "alice.sock"]),
    "tenants.alice.mode": st.sampled_from(["0600", "0666"]),
    "tenants.alice.group": st.sampled_from(["", "render", "44"]),
    "tenants.alice.quota_bytes": st.integers(0, 1 << 40),
    "tenants.alice.disk_quota_bytes": st.integers(0, 1 << 40),
    "tenants.alice.token_file": st.sampled_from(["", "/etc/kvstore/alice.token"]),
    "tenants.alice.client_names": st.sampled_from(["", "engine-1.example, spiffe://a/b"]),
}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    return str(value)


def _toml(values: dict[str, Any]) -> str:
    lines = []
    for name, value in values.items():
        shown = _text(value)
        if isinstance(value, str):
            shown = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        lines.append(f"{name} = {shown}")
    return "\n".join(lines)


def _without_origins(settings: Settings) -> dict[str, Any]:
    return {
        section: getattr(settings, section)
        for section in settings.__struct_fields__
        if section != "origins"
    }


def test_every_setting_is_covered_here() -> None:
    assert set(_VALUES) == set(setting_names("alice"))


@given(st.fixed_dictionaries({}, optional=_VALUES))
def test_file_environment_and_flags_agree(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    file = tmp_path_factory.mktemp("config") / "kvstored.toml"
    file.write_text(_toml(values), encoding="utf-8")
    by_file = load(str(file), environ=CLEAN)
    by_env = load(environ=CLEAN | {env_name(name): _text(one) for name, one in values.items()})
    arguments = [f"--{name}={_text(one)}" for name, one in values.items()]
    by_flags = load(environ=CLEAN, flags=parse_flags(arguments))
    assert _without_origins(by_file) == _without_origins(by_env) == _without_origins(by_flags)
    for name, value in values.items():
        section, *tenant, field = name.split(".")
        found = getattr(by_file, section)
        found = getattr(found[tenant[0]] if tenant else found, field)
        assert found == value


@given(st.fixed_dictionaries({}, optional=_VALUES))
def test_what_is_shown_can_be_loaded(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    first = load(environ=CLEAN, flags={name: _text(one) for name, one in values.items()})
    file = tmp_path_factory.mktemp("config") / "shown.toml"
    file.write_text(render_toml(first), encoding="utf-8")
    second = load(str(file), environ={})
    assert _without_origins(second) == _without_origins(first)


def test_later_sources_win_and_are_told(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[host]\ncapacity_bytes = "1GiB"\nmlock = "off"\n[trace]\nring_records = 7\n')
    environ = CLEAN | {"KVSTORE_HOST__CAPACITY_BYTES": "2GiB", "KVSTORE_TRACE__RING_RECORDS": "8"}
    settings = load(str(file), environ=environ, flags={"host.capacity_bytes": "3GiB"})
    assert settings.host.capacity_bytes == 3 << 30
    assert settings.trace.ring_records == 8
    shown = render_toml(settings)
    assert 'capacity_bytes = "3GiB"  # flag --host.capacity_bytes' in shown
    assert "ring_records = 8  # environment KVSTORE_TRACE__RING_RECORDS" in shown
    assert f'mlock = "off"  # file {file}' in shown
    assert 'log_level = "info"  # default' in shown


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("host.capacity_bytes", "-1"),
        ("host.capacity_bytes", "4 parsecs"),
        ("host.capacity_bytes", "99999999TiB"),
        ("host.allow_smaller", "yes"),
        ("host.mlock", "maybe"),
        ("server.drain_grace_s", "nan"),
        ("server.drain_grace_s", "inf"),
        ("server.drain_grace_s", "-1"),
        ("server.drain_grace_s", "soon"),
        ("server.runtime_dir", "relative/folder"),
        ("server.runtime_dir", "/run/with\nnewline"),
        ("server.runtime_dir", "/run/" + "x" * 120),
        ("limits.keys_per_call_max", "0"),
        ("limits.keys_per_call_max", "1.5"),
        ("limits.lease_ttl_ms", "9" * 30),
        ("http.listen", "9472"),
        ("http.listen", "host:"),
        ("http.listen", "::1:80"),
        ("http.listen", "127.0.0.1:65536"),
        ("tenants.a.mode", "0999"),
        ("tenants.a.mode", "rw"),
        ("tenants.a.socket", "/etc/passwd"),
        ("tenants.a.socket", "../other.sock"),
        ("tenants.a.socket", "."),
        ("tenants.a.socket", "x.fd"),
        ("tenants.a.socket", "admin.sock"),
        ("state.path", "here"),
        ("disk.path", "here"),
        ("disk.endurance_bytes_per_day", "1TB"),
        ("trace.file", "here.jsonl"),
        ("tcp.listen", "9473"),
        ("tcp.cert_file", "tls.crt"),
        ("tenants.a.token_file", "a.token"),
    ],
)
def test_a_wrong_value_names_its_setting(name: str, text: str) -> None:
    with pytest.raises(StartError) as caught:
        load(environ=CLEAN, flags={name: text})
    assert caught.value.reason is Reason.START_SETTINGS
    assert caught.value.setting == name
    assert caught.value.detail


def test_an_unknown_name_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[host]\ncapacity_byte = 1\n")
    with pytest.raises(StartError, match=r"nearest is 'host\.capacity_bytes'"):
        load(str(file), environ=CLEAN)
    with pytest.raises(StartError, match=r"nearest is 'limits\.sessions_max'"):
        load(environ=CLEAN | {"KVSTORE_LIMITS__SESSION_MAX": "1"})
    with pytest.raises(StartError, match=r"nearest is 'tenants\.bob\.quota_bytes'"):
        load(environ=CLEAN, flags={"tenants.bob.quota_byte": "1"})
    with pytest.raises(StartError, match=r"there is no setting 'hst\.mlock'"):
        parse_flags(["--hst.mlock", "off"])


@pytest.mark.parametrize("tenant", ["Ä", "Alice", "-a", "", "a" * 33, "a/b"])
def test_a_tenant_name_that_could_be_a_path_or_a_label_is_refused(tenant: str) -> None:
    with pytest.raises(StartError, match="a tenant's name is") as caught:
        load(environ=CLEAN, flags={f"tenants.{tenant}.mode": "0600"})
    assert caught.value.setting == f"tenants.{tenant}"


def test_an_unknown_section_and_a_section_that_is_no_table(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for text in ("[hots]\n", "host = 3\n", "[tenants]\nalice = 3\n", "not toml"):
        file.write_text(text)
        with pytest.raises(StartError):
            load(str(file), environ=CLEAN)
    with pytest.raises(StartError, match="cannot read"):
        load(str(tmp_path / "absent.toml"), environ=CLEAN)


def test_environment_of_an_orchestrator_is_no_setting_but_a_slip_is_told() -> None:
    injected = {"KVSTORE_PORT": "tcp://10.0.0.1:80", "KVSTORE_SERVICE_HOST": "10.0.0.1"}
    assert load(environ=CLEAN | injected) == load(environ=CLEAN)
    with pytest.raises(StartError, match="the name is KVSTORE_HOST__CAPACITY_BYTES"):
        load(environ=CLEAN | {"KVSTORE_HOST_CAPACITY_BYTES": "4GiB"})


def test_an_empty_tenant_table_is_a_tenant(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[tenants.alice]\n[tenants.default]\n")
    settings = load(str(file), environ=CLEAN)
    assert list(settings.tenants) == ["alice", "default"]
    assert settings.data_socket("default") == "/run/user/7/kvstore/data.sock"
    assert settings.data_socket("alice") == "/run/user/7/kvstore/alice/data.sock"


def test_the_runtime_folder_follows_from_the_user() -> None:
    assert load(environ={}, uid=0).server.runtime_dir == "/run/kvstore"
    assert load(environ={}, uid=12).server.runtime_dir == "/tmp/kvstore-12"
    assert load(environ={"XDG_RUNTIME_DIR": "x"}, uid=12).server.runtime_dir == "/tmp/kvstore-12"


def test_limits_follow_from_the_capacity() -> None:
    limits = load(environ=CLEAN).limits_for(1 << 30)
    assert limits.staging_bytes == limits.part_bytes_max == 1 << 27
    assert limits.view_bytes_per_session_max == 1 << 28
    with pytest.raises(StartError) as caught:
        load(environ=CLEAN, flags={"host.staging_bytes": "600MiB"}).limits_for(1 << 30)
    assert caught.value.setting == "host.staging_bytes"
    quotas = {"tenants.a.quota_bytes": "600MiB", "tenants.b.quota_bytes": "500MiB"}
    with pytest.raises(StartError) as caught:
        load(environ=CLEAN, flags=quotas).limits_for(1 << 30)
    assert caught.value.setting == "tenants.a.quota_bytes"
    on_disk = {f"tenants.{name}.disk_quota_bytes": "6GiB" for name in "ab"}
    load(environ=CLEAN, flags=on_disk).limits_for(1 << 30)
    with pytest.raises(StartError) as caught:
        load(environ=CLEAN, flags={**on_disk, "disk.capacity_bytes": "10GiB"}).limits_for(1 << 30)
    assert caught.value.setting == "tenants.a.disk_quota_bytes"


def test_a_host_tier_of_next_to_nothing_is_a_slip() -> None:
    settings = load(environ=CLEAN, flags={"host.capacity_bytes": "16"})
    with pytest.raises(StartError, match=r"16B hold no blocks: 64KiB .*host\.capacity_bytes"):
        settings.limits_for(settings.host.capacity_bytes)
    assert settings.limits_for(1 << 20).staging_bytes == 1 << 17


@given(st.integers(0, (1 << 62) - 1))
def test_sizes_round_trip(size_bytes: int) -> None:
    assert parse_size(show_size(size_bytes)) == size_bytes
    assert parse_size(str(size_bytes)) == size_bytes


def test_bounds_are_shown_exactly() -> None:
    accepts = {one.name: one.accepts for one in knobs()}
    assert accepts["limits.keys_per_call_max"] == "whole number from 1 to 1048576"
    assert accepts["server.drain_grace_s"] == "number from 0 to 600"


def test_sizes_by_hand() -> None:
    assert parse_size("1.5 GiB") == 3 << 29
    assert parse_size("0.5KiB") == 512
    for text in ("", "GiB", "1.3B", "4gb", "1e9", "-1", "0x10", "4GB"):
        with pytest.raises(ValueError, match="not a"):
            parse_size(text)


def test_few_knobs_each_with_its_text() -> None:
    table = knobs()
    assert len(table) < 56, "each tier has a path, a capacity and a budget; a guard a stop line"
    shown = explain()
    for one in table:
        assert one.name in shown
        assert one.env in shown
        assert one.what.rstrip().endswith(".")
        assert one.when.endswith((".", ")."))
    numbers = [f for fields in FIELDS.values() for f in fields.values() if f.kind in (int, float)]
    assert all(math.isfinite(one.default) for one in numbers)


_TCP = {
    "tcp.listen": "0.0.0.0:9473",
    "tcp.cert_file": "/s/tls.crt",
    "tcp.key_file": "/s/tls.key",
    "tcp.client_ca_file": "/s/ca.crt",
    "tenants.a.token_file": "/s/a.token",
    "tenants.a.client_names": "engine-a, spiffe://cluster/a",
}


def test_tcp_as_it_should_be() -> None:
    more = {"tenants.b.token_file": "/s/b", "tenants.b.client_names": "engine-b"}
    settings = load(environ=CLEAN, flags=_TCP | more | {"tenants.c.mode": "0600"})
    assert settings.tcp.address == ("0.0.0.0", 9473)
    assert settings.tenants["a"].certificate_names == ("engine-a", "spiffe://cluster/a")
    assert settings.tenants["c"].certificate_names == ()
    assert load(environ=CLEAN).tcp.address is None


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"tcp.cert_file": ""}, "tcp.cert_file"),
        ({"tcp.key_file": ""}, "tcp.key_file"),
        ({"tcp.client_ca_file": ""}, "tcp.client_ca_file"),
        ({"tenants.a.token_file": ""}, "tenants.a.token_file"),
        ({"tenants.a.client_names": " , "}, "tenants.a.client_names"),
        ({"tenants.a.token_file": "", "tenants.a.client_names": ""}, "tcp.listen"),
        ({"tenants.b.client_names": "engine-b"}, "tenants.b.token_file"),
        (
            {"tenants.b.client_names": "x,engine-a", "tenants.b.token_file": "/s/b"},
            "tenants.b.client_names",
        ),
    ],
)
def test_tcp_lacks_nothing(change: dict[str, str], setting: str) -> None:
    with pytest.raises(StartError) as caught:
        load(environ=CLEAN, flags=_TCP | change)
    assert caught.value.setting == setting


def test_the_ledger_lies_in_the_disk_tiers_folder_unless_told_otherwise() -> None:
    def ledger(**flags: str) -> str:
        return load(
            environ=CLEAN, flags={k.replace("__", "."): v for k, v in flags.items()}
        ).ledger_path

    assert ledger() == ""
    assert ledger(state__path="/s") == "/s"
    assert ledger(disk__path="/d") == "/d/ledger"
    assert ledger(disk__path="/d", state__path="/s") == "/s"


def test_flags_are_parsed_in_both_forms() -> None:
    arguments = [
        "--host.allow_smaller",
        "--host.mlock",
        "off",
        "--http.listen=",
        "--state.path=/a=b",
    ]
    assert parse_flags(arguments) == {
        "host.allow_smaller": "true",
        "host.mlock": "off",
        "http.listen": "",
        "state.path": "/a=b",
    }
    assert parse_flags(["--host.allow_smaller", "false"]) == {"host.allow_smaller": "false"}
    for bad in (["--host.mlock"], ["stray"], ["--"], ["-h"]):
        with pytest.raises(StartError):
            parse_flags(bad)
