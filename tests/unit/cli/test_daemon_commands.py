"""Commands that ask the daemon: what they send, print and end with."""

from __future__ import annotations

import io
import json
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.cli import COMMANDS
from kvstore.model.fingerprint import Encoding, Fingerprint, Geometry, Identity
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore.model.record import RecordBuilder
from kvstore.wire import convert
from kvstore.wire.v1 import admin_pb2 as pb
from kvstore.wire.v1 import store_pb2
from tests.unit.cli.conftest import FakeAdmin, Run

GIB = 1 << 30
KEY = "ab" * 32
BEYOND_64_BITS = str(2**64)
NO_UNICODE = "a\udcff"
"""As the shell hands over a byte that is no UTF-8."""


def fingerprint(revision: str | None = "rev-1") -> Fingerprint:
    return Fingerprint(
        Identity("llama", weights_revision=revision, weight_epoch=3, config_digest="c"),
        Geometry("gqa", 32, 8, 128),
        Encoding("bfloat16", 16, "layer_kv_head_token_dim"),
    )


def reason(value: Reason) -> store_pb2.Reason.ValueType:
    return convert.reason_to_wire(value)


def stats() -> pb.StatsReply:
    return pb.StatsReply(
        version="0.1.0",
        instance_id=bytes(range(16)),
        uptime_s=3 * 3600 + 300,
        state="ready",
        tiers=[
            pb.TierStats(
                name="host", state="ok", capacity_bytes=4 * GIB, used_bytes=GIB,
                block_bytes=GIB // 2, blocks=512, free_slots=7, regions=3, staging_bytes=256 << 20,
                evictions=12,
            )
        ],
        tenants=[
            pb.TenantStats(tenant="default", used_bytes=GIB, blocks=512, hit_tokens=750,
                           lookup_tokens=1_000)
        ],
        sessions=2,
        read_leases=3,
        pins=1,
        spaces_open=4,
        spaces_held=1,
        counters={"kvstore_requests_total{op=lookup}": 10.0},
    )  # fmt: skip


# ------------------------------------------------------------------ the way to the daemon


def test_no_daemon_is_one_line_and_code_4(run: Run, folder: Path) -> None:
    alone = {"bench", "plan", "report", "review", "simulate", "token", "verify"}
    for name in sorted(set(COMMANDS) - alone):
        arguments = {
            "explain": ("--space", "1", KEY),
            "invalidate": ("--space", "1"),
            "pin": ("--space", "1", KEY),
            "unpin": ("1",),
            "top": ("--once",),
        }.get(name, ())
        result = run(name, *arguments, "--runtime-dir", str(folder), code=4)
        (line,) = result.stderr.splitlines()
        assert str(folder / "admin.sock") in line
        assert "--runtime-dir" in line
    run("review", "list", "--runtime-dir", str(folder), code=4)


def test_a_dead_socket_is_code_4(run: Run, folder: Path) -> None:
    path = folder / "admin.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    assert stat.S_ISSOCK(path.stat().st_mode)
    result = run("status", "--admin-socket", str(path), code=4)
    assert "is kvstored running?" in result.stderr


def test_a_file_that_is_no_socket_is_code_4(run: Run, folder: Path) -> None:
    (folder / "admin.sock").write_text("")
    assert "is no socket" in run("status", "--runtime-dir", str(folder), code=4).stderr


def test_another_socket_than_the_admin_one_is_told(
    ask: Run, run: Run, admin: FakeAdmin, folder: Path
) -> None:
    (folder / "admin.sock.fd").touch()  # as beside a data socket
    admin.code = grpc.StatusCode.UNIMPLEMENTED
    (line,) = ask("status", code=1).stderr.splitlines()
    assert "is a data socket" in line
    assert "--admin-socket" in line
    wrong = run("status", "--admin-socket", str(folder / "data.sock.fd"), code=4)
    assert "hands out memory" in wrong.stderr


def test_a_path_too_long_for_a_socket_is_one_line(run: Run) -> None:
    for command, option in (("status", "--admin-socket"), ("bench", "--socket")):
        result = run(command, option, "/" + "n" * 110, code=4)
        (line,) = result.stderr.splitlines()
        assert "too long for a socket by 4 bytes" in line


def test_a_silent_daemon_is_code_4_in_time(ask: Run, admin: FakeAdmin) -> None:
    admin.code = grpc.StatusCode.DEADLINE_EXCEEDED
    assert "--timeout" in ask("status", code=4).stderr


def test_an_older_daemon_is_told(ask: Run, admin: FakeAdmin) -> None:
    admin.code = grpc.StatusCode.UNIMPLEMENTED
    assert "compare the versions" in ask("config", code=1).stderr


def test_a_refusal_names_reason_detail_and_setting(ask: Run, admin: FakeAdmin) -> None:
    admin.error = KVStoreError(Reason.TOO_MANY_KEYS, "20000 keys", "limits.keys_per_call_max")
    line = ask("pin", "--space", "1", KEY, code=1).stderr
    assert "TOO_MANY_KEYS: 20000 keys (setting: limits.keys_per_call_max)" in line


def test_where_the_socket_is_follows_the_daemons_rule(
    run: Run, admin: FakeAdmin, folder: Path
) -> None:
    admin.replies["Stats"] = stats()
    run("status", env={"KVSTORE_SERVER__RUNTIME_DIR": str(folder)})
    run("status", "--admin-socket", str(admin.socket), env={"XDG_RUNTIME_DIR": "/nowhere"})
    error = run("status", env={"XDG_RUNTIME_DIR": str(folder)}, code=4).stderr
    assert str(folder / "kvstore" / "admin.sock") in error
    unknown = run("status", env={"KVSTORE_HOST__CAPACITY": "1"}, code=2).stderr
    assert "host.capacity_bytes" in unknown


def test_help_and_version_need_nothing_heavy() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from kvstore.cli import main; "
        "assert CliRunner().invoke(main, ['--version']).exit_code == 0; "
        "r = CliRunner().invoke(main, ['plan', '--model', 'llama-3.1-8b', '--tokens', '9']); "
        "assert r.exit_code == 0, r.output; "
        "print(sorted({'grpc', 'torch', 'rich', 'lmdb', 'kvstore_server'} & set(sys.modules)))"
    )
    roots = Path(__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=roots, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_every_command_helps(run: Run) -> None:
    listed = run("--help").output
    for name in COMMANDS:
        assert name in listed
        assert "Usage" in run(name, "--help").output


def test_an_unknown_command_is_code_2(run: Run) -> None:
    run("destroy", code=2)


# ------------------------------------------------------------------ looking


def test_status(ask: Run, admin: FakeAdmin) -> None:
    admin.replies["Stats"] = stats()
    output = ask("status").output
    for text in ("ready", "3 h 5 min", "1 GiB", "4 GiB", "25.0 %", "75.0 %", "equal share", "12"):
        assert text in output
    fields = json.loads(ask("status", "--json").output)
    assert fields["tiers"][0]["capacity_bytes"] == 4 * GIB
    assert fields["tenants"][0]["hit_tokens"] == 750
    assert fields["counters"] == {"kvstore_requests_total{op=lookup}": 10.0}
    assert (fields["sessions"], fields["read_leases"], fields["spaces_held"]) == (2, 3, 1)


def archived() -> pb.StatsReply:
    """A daemon with a disk tier that wrote most of what it may."""
    reply = stats()
    reply.tiers.add(
        name="disk", state="ok", capacity_bytes=64 * GIB, used_bytes=GIB, blocks=900, free_slots=100
    )
    for name, value in (
        ("slots", 1_000),
        ("eviction_age_seconds", 7_500),
        ("written_day_bytes", 90 * GIB),
        ("endurance_day_bytes", 120 * GIB),
        ("aside_bytes", 3 * GIB),
    ):
        reply.counters[f"kvstore_disk_{name}"] = value
    return reply


def test_an_archive_shows_slots_ages_and_writes_against_their_budget(
    ask: Run, admin: FakeAdmin
) -> None:
    from rich.console import Console

    from kvstore.cli.top import frame

    admin.replies["Stats"] = archived()
    wanted = "disk 1,000 100 2 h 5 min 90 GiB 120 GiB 75.0 % 3 GiB"
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(frame(stats(), archived()))
    for text in (
        ask("status").output,
        ask("top", "--once").output,
        console.export_text(),
    ):
        assert wanted in [" ".join(line.split()) for line in text.splitlines()]
    admin.replies["Stats"].counters["kvstore_disk_endurance_day_bytes"] = 0
    assert "no limit" in ask("status").output
    admin.replies["Stats"] = stats()
    assert "archive" not in ask("status").output


def test_top_once(ask: Run, admin: FakeAdmin) -> None:
    admin.replies["Stats"] = stats()
    assert "host" in ask("top", "--once").output
    assert json.loads(ask("top", "--once", "--json").output)["state"] == "ready"


def test_top_shows_what_moved_the_busiest_first() -> None:
    from kvstore.cli.top import rates

    before = {"a": 1.0, "b": 5.0, "same": 2.0}
    after = {"a": 2.0, "b": 25.0, "same": 2.0, "new": 4.0}
    assert rates(before, after, 2.0) == [("b", 10.0), ("new", 2.0), ("a", 0.5)]


def test_top_draws_a_frame() -> None:
    from rich.console import Console

    from kvstore.cli.top import frame

    before, after = stats(), stats()
    after.counters["kvstore_requests_total{op=lookup}"] = 30.0
    after.uptime_s = before.uptime_s + 2
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(frame(before, after))
    text = console.export_text()
    assert "kvstore_requests_total{op=lookup}" in text
    assert "10.0" in text


def test_spaces(ask: Run, admin: FakeAdmin) -> None:
    offer = fingerprint()
    admin.replies["Spaces"] = pb.SpacesReply(
        spaces=[
            pb.SpaceInfo(
                space_id=7, tenant="default", state="held", blocks=3, bytes=3 << 20, review_id=2,
                fingerprint=convert.fingerprint_to_wire(offer), fingerprint_digest=offer.digest,
            )
        ],
        epoch_floors={"llama": 3},
    )  # fmt: skip
    output = ask("spaces").output
    for text in ("llama", "held (review 2)", "bfloat16", "3 MiB", offer.digest.hex()[:12]):
        assert text in output
    fields = json.loads(ask("spaces", "--json").output)
    assert Fingerprint.from_dict(fields["spaces"][0]["fingerprint"]) == offer
    assert fields["epoch_floors"] == {"llama": 3}
    admin.replies["Spaces"] = pb.SpacesReply()
    assert "no spaces" in ask("spaces").output


def test_config(ask: Run, admin: FakeAdmin) -> None:
    admin.replies["Config"] = pb.ConfigReply(toml='[host]\ncapacity_bytes = "4GiB"\n')
    assert ask("config").output == '[host]\ncapacity_bytes = "4GiB"\n'
    assert json.loads(ask("config", "--json").output) == {"host": {"capacity_bytes": "4GiB"}}


def record_line() -> str:
    builder = RecordBuilder("lookup", "req-9", "default", 0)
    builder.prompt(1, bytes(64), 16)
    builder.stage("input", 1_500)
    builder.stage("preconditions", 2_000)
    builder.count("tokens", 32, 0)
    return builder.finish(Reason.MISS_EVICTED, 9_000).to_json_line()


def test_trace(ask: Run, admin: FakeAdmin) -> None:
    admin.replies["Trace"] = pb.TraceReply(records=[record_line()])
    output = ask("trace", "--last", "5", "--request-id", "req-9", "--outcome", "miss").output
    for text in ("lookup", "req-9", "MISS_EVICTED", "resources", "plan", "32 tokens", "1.5", "9.0"):
        assert text in output
    assert admin.the_request("Trace") == pb.TraceRequest(last=5, request_id="req-9", outcome="miss")
    (line,) = ask("trace", "--json").output.splitlines()
    assert json.loads(line)["reason"] == "MISS_EVICTED"
    admin.replies["Trace"] = pb.TraceReply()
    assert "trace.ring_records" in ask("trace", code=1).stderr


# ------------------------------------------------------------------ explain


def explained(value: Reason, **more: Any) -> store_pb2.ExplainReply:
    key = store_pb2.KeyExplanation(key="abababab", reason=reason(value), age_s=-1, **more)
    return store_pb2.ExplainReply(reason=reason(value), keys=[key])


def test_explain_a_key_that_is_there(ask: Run, admin: FakeAdmin) -> None:
    admin.replies["Explain"] = explained(Reason.HIT, tier="host", generation=5, leases=2)
    output = ask("explain", "--space", "7", KEY).output
    assert "abababab  HIT" in output
    assert "tier host, generation 5, 2 leases" in output
    request = admin.the_request("Explain")
    assert (request.space_id, request.keys) == (7, bytes.fromhex(KEY))


def test_explain_a_miss_names_fields_origin_and_what_to_do(ask: Run, admin: FakeAdmin) -> None:
    difference = store_pb2.Difference(
        field="identity.weights_revision", stored="rev-1", offered="rev-2"
    )
    admin.replies["Explain"] = explained(
        Reason.MISS_INCOMPATIBLE, differences=[difference], detail="space 3 holds it"
    )
    output = ask("explain", "--space", "7", KEY, code=1).output
    assert "MISS_INCOMPATIBLE (data)" in output
    assert Reason.MISS_INCOMPATIBLE.text in output
    assert "identity.weights_revision: stored rev-1, offered rev-2" in output
    assert "space 3 holds it" in output
    fields = json.loads(ask("explain", "--space", "7", KEY, "--json", code=1).output)
    assert fields["keys"][0]["differences"] == [
        {"field": "identity.weights_revision", "stored": "rev-1", "offered": "rev-2"}
    ]
    assert fields["keys"][0]["origin"] == "data"


def test_explain_a_fingerprint(ask: Run, admin: FakeAdmin, tmp_path: Path) -> None:
    offer = fingerprint(revision=None)
    file = tmp_path / "fingerprint.json"
    file.write_text(json.dumps(offer.to_dict()))
    admin.replies["Explain"] = store_pb2.ExplainReply(
        verdict=store_pb2.VERDICT_HELD,
        reason=reason(Reason.HELD_FOR_REVIEW),
        differences=[store_pb2.Difference(field="identity.weights_revision", stored="rev-1")],
    )
    output = ask("explain", "--fingerprint", str(file), "--tenant", "blue", code=1).output
    assert "verdict: held" in output
    assert "HELD_FOR_REVIEW" in output
    assert "identity.weights_revision: stored rev-1, offered (absent)" in output
    request = admin.the_request("Explain")
    assert request.tenant == "blue"
    assert convert.fingerprint_from_wire(request.fingerprint) == offer

    admin.replies["Explain"] = store_pb2.ExplainReply(
        verdict=store_pb2.VERDICT_MATCH, reason=reason(Reason.OK)
    )
    fields = json.loads(ask("explain", "--fingerprint", str(file), "--json").output)
    assert fields["verdict"] == "match"
    output = ask("explain", "--fingerprint", str(file), KEY, code=1).output
    assert "holds none of the keys" in output

    # Welcome, but never offered: nothing is there.
    admin.replies["Explain"] = store_pb2.ExplainReply(
        verdict=store_pb2.VERDICT_MATCH,
        reason=reason(Reason.MISS_INCOMPATIBLE),
        detail="it would begin with nothing stored",
    )
    output = ask("explain", "--fingerprint", str(file), code=1).output
    assert "MISS_INCOMPATIBLE" in output
    assert "it would begin with nothing stored" in output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "is no JSON"),
        (b"\xff\xfe{", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"9" * 5_000, "is no JSON"),
        (b'{"identity": {"model_name": 1}}', "identity.model_name"),
    ],
    ids=["cut", "binary", "deep", "digits", "field"],
)
def test_explain_a_malformed_fingerprint_is_code_2(
    ask: Run, tmp_path: Path, text: bytes, says: str
) -> None:
    file = tmp_path / "fingerprint.json"
    file.write_bytes(text)
    assert says in ask("explain", "--fingerprint", str(file), code=2).stderr


def test_keys_are_checked_and_can_be_piped(ask: Run, admin: FakeAdmin) -> None:
    for bad in ("abc", "zz" * 32, "ab" * 31):
        assert "64 hexadecimal digits" in ask("explain", "--space", "1", bad, code=2).stderr
    assert "at least one key" in ask("explain", "--space", "1", code=2).stderr
    assert "one of --space" in ask("explain", code=2).stderr
    there = store_pb2.KeyExplanation(key="abababab", reason=reason(Reason.HIT))
    admin.replies["Explain"] = store_pb2.ExplainReply(keys=[there, there])
    ask("explain", "--space", "1", "-", input=f"{KEY}\n{'cd' * 32}\n")
    assert admin.the_request("Explain").keys == bytes.fromhex(KEY + "cd" * 32)


@pytest.mark.parametrize(
    "arguments",
    [
        ("unpin", BEYOND_64_BITS),
        ("pin", "--space", BEYOND_64_BITS, KEY),
        ("explain", "--space", BEYOND_64_BITS, KEY),
        ("invalidate", "--space", BEYOND_64_BITS),
        ("epoch", "llama", BEYOND_64_BITS),
        ("review", "approve", BEYOND_64_BITS, "--revision", "r", "--reason", "w"),
        ("review", "reject", BEYOND_64_BITS, "--reason", "w"),
        ("review", "reject", "1", "--reason", NO_UNICODE),
        ("epoch", NO_UNICODE, "3"),
        ("invalidate", "--model", NO_UNICODE),
        ("trace", "--request-id", NO_UNICODE),
        ("drain", "--grace", "nan"),
        ("drain", "--grace", "inf"),
        ("status", "--timeout", "nan"),
        ("status", "--timeout", "1e300"),
        ("top", "--interval", "1e300"),
    ],
)
def test_what_no_message_can_carry_is_code_2(
    ask: Run, admin: FakeAdmin, arguments: tuple[str, ...]
) -> None:
    assert "Error: " in ask(*arguments, code=2).stderr
    assert not any(admin.requests.values()), "nothing was asked"


# ------------------------------------------------------------------ deciding


def test_review_list(ask: Run, run: Run, admin: FakeAdmin, folder: Path) -> None:
    admin.replies["Reviews"] = pb.ReviewsReply(
        reviews=[
            pb.ReviewInfo(
                review_id=4, tenant="default", state="held", blocks=9, age_s=120,
                fingerprint=convert.fingerprint_to_wire(fingerprint(None)),
                missing=["identity.weights_revision"],
            )
        ]
    )  # fmt: skip
    at = ("--runtime-dir", str(folder))
    output = run("review", "list", *at).output
    for text in ("4", "llama", "held", "identity.weights_revision", "2 min 0 s"):
        assert text in output
    (fields,) = json.loads(run("review", "list", "--all", "--json", *at).output)
    assert fields["missing"] == ["identity.weights_revision"]
    assert [request.all for request in admin.requests["Reviews"]] == [False, True]
    admin.replies["Reviews"] = pb.ReviewsReply()
    assert "nothing to review" in run("review", "list", *at).output


def test_review_approve(ask: Run, admin: FakeAdmin) -> None:
    admin.replies["Review"] = pb.ReviewReply(reason=reason(Reason.OK), space_id=8, durable=True)
    arguments = ("--revision", "rev-1", "--reason", "checked", "--who", "ada")
    output = ask("review", "approve", "4", *arguments).output
    assert output == "approved review 4 into space 8\n"
    assert admin.the_request("Review") == pb.ReviewRequest(
        review_id=4, approve=True, revision="rev-1", who="ada", why="checked"
    )
    ask("review", "approve", "4", "--reason", "blocks are right", "--who", "ada")
    assert admin.requests["Review"][-1].revision == "", "which the daemon refuses if it is missing"
    ask("review", "approve", "4", "--revision", "rev-1", code=2)


def test_review_reject_and_what_is_not_durable(ask: Run, admin: FakeAdmin) -> None:
    for value in (Reason.OK, Reason.REJECTED_BY_REVIEW):
        admin.replies["Review"] = pb.ReviewReply(reason=reason(value))
        result = ask("review", "reject", "4", "--reason", "unknown weights")
        assert "rejected review 4" in result.stdout
        assert "state.path" in result.stderr
    assert admin.requests["Review"][0].who  # this user
    assert not admin.requests["Review"][0].approve


def test_review_that_is_not_so(ask: Run, admin: FakeAdmin) -> None:
    admin.replies["Review"] = pb.ReviewReply(
        reason=reason(Reason.SPACE_UNKNOWN), detail="no review 4"
    )
    error = ask("review", "approve", "4", "--revision", "r", "--reason", "w", code=1).stderr
    assert "SPACE_UNKNOWN: no review 4" in error


def test_invalidate(ask: Run, admin: FakeAdmin) -> None:
    admin.replies["Invalidate"] = pb.InvalidateReply(dropped_blocks=1_234, spaces=2)
    assert "1,234 blocks of 2 spaces" in ask("invalidate", "--model", "llama").output
    ask("invalidate", "--space", "3", KEY, "--reason", "poisoned")
    ask("invalidate", "--everything", "--tenant", "blue", "--yes")
    ask("invalidate", "--everything", input="y\n")
    assert [r.model_name for r in admin.requests["Invalidate"]] == ["llama", "", "", ""]
    assert admin.requests["Invalidate"][1] == pb.InvalidateRequest(
        space_id=3, keys=bytes.fromhex(KEY), why="poisoned"
    )
    assert admin.requests["Invalidate"][2] == pb.InvalidateRequest(everything=True, tenant="blue")
    fields = json.loads(ask("invalidate", "--model", "llama", "--json").output)
    assert fields == {"dropped_blocks": 1_234, "spaces": 2}


def test_invalidate_asks_first_and_wants_one_target(ask: Run, admin: FakeAdmin) -> None:
    ask("invalidate", "--everything", code=1, input="n\n")
    ask("invalidate", code=2)
    ask("invalidate", "--space", "1", "--model", "m", code=2)
    ask("invalidate", "--model", "m", KEY, code=2)
    assert admin.requests["Invalidate"] == []


def test_epoch(ask: Run, admin: FakeAdmin) -> None:
    admin.replies["Spaces"] = pb.SpacesReply(epoch_floors={"llama": 3, "aya": 1})
    assert ask("epoch").output.splitlines()[1].startswith("aya")
    assert json.loads(ask("epoch", "llama", "--json").output) == {"llama": 3}
    ask("epoch", "qwen", code=1)
    admin.replies["SetWeightEpoch"] = pb.SetWeightEpochReply(
        epoch=5, closed_spaces=2, dropped_blocks=10, durable=True
    )
    assert "epoch 5; closed 2 spaces" in ask("epoch", "llama", "5", "--reason", "rl").output
    assert admin.the_request("SetWeightEpoch") == pb.SetWeightEpochRequest(
        model_name="llama", epoch=5, why="rl"
    )


def test_epoch_never_goes_down_and_says_if_it_is_volatile(ask: Run, admin: FakeAdmin) -> None:
    admin.replies["SetWeightEpoch"] = pb.SetWeightEpochReply(epoch=5)
    assert "never goes down" in ask("epoch", "llama", "4", code=1).stderr
    assert "state.path" in ask("epoch", "llama", "5").stderr
    ask("epoch", "llama", "-1", code=2)


def test_pin_and_unpin(ask: Run, admin: FakeAdmin) -> None:
    admin.replies["Pin"] = pb.PinReply(pin_id=11, pinned=1, reason=reason(Reason.OK))
    assert ask("pin", "--space", "3", KEY).output == "pin 11: 1 of 1 blocks\n"
    result = ask("pin", "--space", "3", KEY, "cd" * 32, code=1)
    assert "1 of 2 not pinned" in result.stderr
    ask("pin", "--space", "3", code=2)
    admin.replies["Unpin"] = pb.UnpinReply(known=True)
    assert ask("unpin", "11").output == "unpinned 11\n"
    admin.replies["Unpin"] = pb.UnpinReply(known=False)
    assert "there is no pin 12" in ask("unpin", "12", code=1).stderr


def test_drain(ask: Run, admin: FakeAdmin) -> None:
    admin.replies["Drain"] = pb.DrainReply(sessions=3)
    assert ask("drain", "--grace", "2.5").output == "draining: 3 sessions have 2.5 s at most\n"
    assert admin.the_request("Drain").grace_s == 2.5
    assert json.loads(ask("drain", "--json").output) == {"sessions": 3, "grace_s": None}


def test_a_drain_has_the_daemons_own_grace_unless_it_is_given_less(
    ask: Run, admin: FakeAdmin
) -> None:
    assert "server.drain_grace_s at most" in ask("drain").output
    assert admin.the_request("Drain").grace_s == 0.0


def test_an_error_of_the_daemon_is_no_traceback(ask: Run, admin: FakeAdmin) -> None:
    admin.error = BadRequest(Reason.SPACE_UNKNOWN, "no space 9; see `kvstore spaces`")
    result = ask("explain", "--space", "9", KEY, code=1)
    assert result.stderr == "Error: SPACE_UNKNOWN: no space 9; see `kvstore spaces`\n"
