"""`kvstore bench`: measures the running daemon through the SDK, beside a plain memory copy."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from kvstore.cli import show
from kvstore.cli.connect import Daemon, NotSo, check_socket, daemon_options, socket_paths
from kvstore.cli.measure import Refused, Result, Space, measure, steps_of
from kvstore.model.fingerprint import (
    ORDER_HEADS,
    Encoding,
    Fingerprint,
    Geometry,
    Identity,
    attention_kind,
)
from kvstore.model.reasons import BadRequest, Reason
from kvstore.wire.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from kvstore_client import Client

F = TypeVar("F", bound=Callable[..., Any])

BLOCK_TOKENS = 16
LAYERS = 16


def _file(option: str, text: str) -> Callable[[F], F]:
    """An option of one file; "" without it, which the client refuses over TCP by its name."""
    return click.option(option, default="", metavar="FILE", help=text)


@click.command(short_help="Measure put, get and lookup.")
@click.option(
    "--socket",
    "data_socket",
    metavar="FILE",
    help="The data socket to measure, or tcp://HOST:PORT with the four files below.",
)
@_file("--tls-ca-file", "Over TCP: authorities of the daemon's certificate.")
@_file("--tls-cert-file", "Over TCP: this client's certificate.")
@_file("--tls-key-file", "Over TCP: its private key.")
@_file("--token-file", "Over TCP: a token of the same tenant.")
@click.option(
    "--blocks", type=click.IntRange(1, 4_096), default=64, show_default=True, help="A round."
)
@click.option(
    "--block-kib",
    type=click.IntRange(1, 1 << 18),
    default=1_024,
    show_default=True,
    help="KiB of a block, rounded up to a power of two.",
)
@click.option("--rounds", type=click.IntRange(1, 1_000), default=5, show_default=True)
@daemon_options
def command(
    daemon: Daemon,
    data_socket: str | None,
    blocks: int,
    block_kib: int,
    rounds: int,
    **tls_files: str,
) -> None:
    """Put, look up and get blocks of random bytes, and compare with a memory copy.

    It stores under a model name of its own and drops it at the end. It takes room from what is
    cached: --blocks times --block-kib times --rounds.
    """
    from kvstore_client import Client, ClientConfig
    from kvstore_client.tcp import opener, tcp_address

    config = ClientConfig(**tls_files)  # type: ignore[arg-type]  # each of them is a text
    _, _, target = socket_paths(daemon.runtime_dir, None, data_socket)
    if tcp_address(target) is None:
        check_socket(target, "--socket")
        target = f"unix:{target}"
    try:
        opener(target, config)
    except BadRequest as error:
        raise click.UsageError(error.detail) from error
    fingerprint = bench_fingerprint(block_kib << 10)
    block_bytes = bytes_of(fingerprint)
    drop = pb.InvalidateRequest(
        model_name=fingerprint.identity.model_name, why="the end of a bench"
    )
    # Nothing is stored before it is known that it can be dropped.
    with daemon.admin() as admin:
        stats = admin.Stats(pb.StatsRequest(), timeout=daemon.timeout_s)
        # Nor does it take memory of this machine for what could never be stored.
        check_room(blocks * block_bytes, stats.tiers[0].capacity_bytes)
        try:
            with Client(target, config=config, engine_id="kvstore bench") as client:
                result = _run(
                    client, fingerprint, blocks, block_bytes, rounds, quiet=daemon.as_json
                )
        except Refused as error:
            raise NotSo(str(error)) from error
        finally:
            admin.Invalidate(drop, timeout=daemon.timeout_s)
    if daemon.as_json:
        show.as_json(as_fields(result))
    else:
        _print(result)


def check_room(round_bytes: int, capacity_bytes: int) -> None:
    """NotSo if a round is more than the daemon's memory tier takes."""
    if round_bytes > capacity_bytes:
        raise NotSo(
            f"a round of {show.size(round_bytes)} is more than the daemon's "
            f"{show.size(capacity_bytes)} of memory: give fewer --blocks or a smaller --block-kib"
        )


def bench_fingerprint(block_bytes: int) -> Fingerprint:
    """A model that nobody has, with blocks of at least so many bytes."""
    head_size = 1
    heads = 2
    while LAYERS * 2 * heads * BLOCK_TOKENS * head_size * 2 < block_bytes:
        if head_size < 128:
            head_size *= 2
        else:
            heads *= 2
    name = f"kvstore-bench-{secrets.token_hex(8)}"
    return Fingerprint(
        Identity(name, weights_revision="bench", config_digest="bench"),
        Geometry(attention_kind(heads, heads), LAYERS, heads, head_size),
        Encoding("bfloat16", BLOCK_TOKENS, ORDER_HEADS),
    )


def bytes_of(fingerprint: Fingerprint) -> int:
    """Bytes of one block."""
    geometry = fingerprint.geometry
    return geometry.layers * 2 * geometry.kv_heads * BLOCK_TOKENS * geometry.head_size * 2


def _run(
    client: Client,
    fingerprint: Fingerprint,
    blocks: int,
    block_bytes: int,
    rounds: int,
    *,
    quiet: bool,
) -> Result:
    from rich.console import Console
    from rich.progress import Progress

    space = client.space(fingerprint)
    status = space.status()
    if status.reason is not Reason.OK:
        raise Refused(f"{status.reason.name}: {status.detail or status.reason.text}")
    steps = measure(
        cast(Space, space),
        blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        block_bytes=block_bytes,
        rounds=rounds,
        now_ns=time.perf_counter_ns,
    )
    with Progress(console=Console(stderr=True), disable=quiet, transient=True) as progress:
        task = progress.add_task("measuring", total=steps_of(rounds))
        for result in steps:
            if result is not None:
                return result
            progress.advance(task)
    raise AssertionError("a measurement ends with its result")


def as_fields(result: Result) -> dict[str, float]:
    """The result as plain values."""
    return {
        "blocks": result.blocks,
        "block_bytes": result.block_bytes,
        "copy_bytes_per_second": result.total_bytes / result.copy_s,
        "put_bytes_per_second": result.total_bytes / result.put_s,
        "get_bytes_per_second": result.total_bytes / result.get_s,
        "put_over_copy": result.put_s / result.copy_s,
        "get_over_copy": result.get_s / result.copy_s,
        "lookup_ms": result.lookup_s * 1e3,
    }


def _print(result: Result) -> None:
    click.echo(f"{result.blocks} blocks of {show.size(result.block_bytes)}, medians")
    rows = [
        (name, f"{result.total_bytes / spent_s / 1e9:.2f}", f"{spent_s / result.copy_s:.2f}")
        for name, spent_s in (
            ("memory copy", result.copy_s),
            ("get", result.get_s),
            ("put", result.put_s),
        )
    ]
    show.columns(("", "GB/s", "copies"), rows)
    click.echo(f"lookup of {result.blocks} blocks: {show.milliseconds(result.lookup_s * 1e3)}")
