"""`kvstore explain`: why a key or a whole fingerprint misses, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvstore.cli import show
from kvstore.cli.arguments import ID, read_json
from kvstore.cli.connect import Daemon, daemon_options, packed_keys
from kvstore.model.fingerprint import Difference, Fingerprint, Verdict
from kvstore.model.reasons import BadRequest, Reason
from kvstore.wire import convert
from kvstore.wire.v1 import admin_pb2 as pb
from kvstore.wire.v1 import store_pb2

_THERE = frozenset({Reason.HIT, Reason.OK, Reason.ALREADY_PRESENT})


@click.command(short_help="Tell why keys or a fingerprint miss.")
@click.option("--space", "space_id", type=ID, help="Explain keys of this space.")
@click.option(
    "--fingerprint",
    "fingerprint_file",
    type=click.File("r"),
    help="Explain what an engine with this fingerprint (JSON) would be told.",
)
@click.option("--tenant", default="default", show_default=True, help="With --fingerprint.")
@click.argument("keys", nargs=-1, metavar="[KEYHEX]...")
@daemon_options
def command(
    daemon: Daemon,
    space_id: int | None,
    fingerprint_file: Any,
    tenant: str,
    keys: tuple[str, ...],
) -> None:
    """Tell why keys (64 hexadecimal digits, "-" reads them) or a fingerprint miss.

    Exit code 0 if engines have offered the fingerprint before, it matches, and every key is there;
    else 1.
    """
    if (space_id is None) == (fingerprint_file is None):
        raise click.UsageError("give one of --space and --fingerprint")
    if space_id is not None and not keys:
        raise click.UsageError("--space needs at least one key")
    request = pb.AdminExplainRequest(keys=packed_keys(keys))
    if space_id is not None:
        request.space_id = space_id
    else:
        request.tenant = tenant
        request.fingerprint.CopyFrom(_offer(fingerprint_file))
    with daemon.admin() as admin:
        reply = admin.Explain(request, timeout=daemon.timeout_s)
    if daemon.as_json:
        show.as_json(_as_fields(reply, by_fingerprint=space_id is None))
    else:
        _print(reply, by_fingerprint=space_id is None)
    verdict = convert.verdict_from_wire(reply.verdict)
    matches = space_id is not None or (
        verdict in (Verdict.MATCH, Verdict.CONVERTIBLE)
        and Reason.from_wire(reply.reason) is Reason.OK
    )
    asked = len(request.keys) // 32
    present = sum(Reason.from_wire(key.reason) in _THERE for key in reply.keys)
    if len(reply.keys) < asked and not daemon.as_json:
        click.echo("no space has this fingerprint, so it holds none of the keys")
    if not matches or present < asked:
        raise click.exceptions.Exit(1)


def _offer(file: Any) -> store_pb2.Fingerprint:
    try:
        return convert.fingerprint_to_wire(Fingerprint.from_dict(read_json(file, "--fingerprint")))
    except BadRequest as error:
        raise click.UsageError(f"--fingerprint: {error.detail}") from error


def _as_fields(reply: store_pb2.ExplainReply, *, by_fingerprint: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if by_fingerprint:
        fields["verdict"] = convert.verdict_from_wire(reply.verdict).value
    return {
        **fields,
        **show.reason_fields(Reason.from_wire(reply.reason)),
        "detail": reply.detail,
        "differences": _differences(reply.differences),
        "keys": [
            {
                "key": key.key,
                **show.reason_fields(Reason.from_wire(key.reason)),
                "tier": key.tier,
                "generation": key.generation,
                "leases": key.leases,
                "age_s": key.age_s,
                "detail": key.detail,
                "differences": _differences(key.differences),
            }
            for key in reply.keys
        ],
    }


def _differences(messages: Sequence[store_pb2.Difference]) -> list[dict[str, Any]]:
    return [
        {"field": d.field, "stored": d.stored, "offered": d.offered}
        for d in convert.differences_from_wire(messages)
    ]


def _print(reply: store_pb2.ExplainReply, *, by_fingerprint: bool) -> None:
    reason = Reason.from_wire(reply.reason)
    if by_fingerprint:
        verdict = convert.verdict_from_wire(reply.verdict)
        click.echo(f"verdict: {verdict.value}")
        click.echo(f"reason:  {reason.name} ({reason.origin.value}): {reason.text}")
        if reply.detail not in ("", reason.text):
            click.echo(f"         {reply.detail}")
    _print_differences(convert.differences_from_wire(reply.differences), "")
    for key in reply.keys:
        why = Reason.from_wire(key.reason)
        click.echo(f"{key.key}  {why.name} ({why.origin.value})")
        click.echo(f"  {why.text}")
        facts = []
        if key.tier:
            facts.append(f"tier {key.tier}, generation {key.generation}, {key.leases} leases")
        if key.age_s >= 0:
            facts.append(f"last event {show.seconds(key.age_s)} ago")
        if key.detail not in ("", why.text):
            facts.append(key.detail)
        for fact in facts:
            click.echo(f"  {fact}")
        _print_differences(convert.differences_from_wire(key.differences), "  ")


def _print_differences(differences: Sequence[Difference], indent: str) -> None:
    for d in differences:
        stored = "(absent)" if d.stored is None else d.stored
        offered = "(absent)" if d.offered is None else d.offered
        click.echo(f"{indent}{d.field}: stored {stored}, offered {offered}")
