"""`kvstore simulate`: what other sizes of memory and disk, or another policy, would have given.

Replays recorded requests through the daemon's own core and policies. Needs no daemon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from kvstore.cli import catalogue, show
from kvstore.model.reasons import BadRequest
from kvstore.policy.choice import NAMES
from kvstore.simulate.lab import Row, Size, run_all, steps_of
from kvstore.simulate.timing import GATE, WAYS, TimeModel
from kvstore.simulate.trace import Request, TraceError, read_trace, traces_in, with_even_blocks


class SizeType(click.ParamType):  # type: ignore[type-arg]  # not generic at run time before 8.3
    """BLOCKS or BLOCKS,DISK_BLOCKS."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Size:
        if isinstance(value, Size):
            return value
        parts = str(value).split(",")
        if len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
            self.fail(f"{value!r} is not BLOCKS or BLOCKS,DISK_BLOCKS", param, ctx)
        size = Size(int(parts[0]), int(parts[1]) if len(parts) == 2 else 0)
        if not 1 <= size.memory_blocks <= 10**8 or size.disk_blocks > 10**9:
            self.fail("memory has 1 to 10^8 blocks, the disk at most 10^9", param, ctx)
        return size


@click.command(
    short_help="Replay recorded requests at other sizes and policies.",
    epilog="FILE: JSON lines with timestamp (ms), input_length (tokens) and hash_ids, one id a "
    "block; .gz is understood. A folder is a daemon's access log (record.path), and so are its "
    "files in their order. Hits count only while every block before them hit.",
)
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE...",
    type=click.Path(exists=True, path_type=Path),
)  # fmt: skip
@click.option(
    "--capacity", "sizes", type=SizeType(), multiple=True, required=True,
    metavar="BLOCKS[,DISK_BLOCKS]", help="Blocks of memory, and of disk; may be repeated.",
)  # fmt: skip
@click.option(
    "--policy", "policies", type=click.Choice(NAMES), multiple=True,
    help="May be repeated; without it all of them.",
)  # fmt: skip
@click.option(
    "--count-from", default=0, type=click.IntRange(min=0), metavar="N",
    help="Requests before number N warm up and are not counted.",
)  # fmt: skip
@click.option(
    "--even-blocks", is_flag=True, help="Spread a prompt's tokens evenly over its blocks."
)
@click.option(
    "--engine", metavar="FIT",
    help="Tell the time against no cache for a known prefill fit, as \"Llama-3.1-8B 1xH100\"; see "
    "`kvstore plan --list`.",
)  # fmt: skip
@click.option("--dtype", "kv_dtype", default="bfloat16", show_default=True, help="KV type: fp8.")
@click.option(
    "--memory-link", default="50GB/s", show_default=True, metavar="NAME|RATE",
    help="Path from memory to the engine, for --engine.",
)  # fmt: skip
@click.option(
    "--disk-link", default="nvme-gen4-read", show_default=True, metavar="NAME|RATE",
    help="Path from disk to the engine, for --engine.",
)  # fmt: skip
@click.option(
    "--plot", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="PNG",
    help="Draw the hit rate by capacity, a line a policy; needs the extra `plot`.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    files: tuple[Path, ...],
    sizes: tuple[Size, ...],
    policies: tuple[str, ...],
    count_from: int,
    even_blocks: bool,
    engine: str | None,
    kv_dtype: str,
    memory_link: str,
    disk_link: str,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay FILE through the core, and say how often it would have hit.

    kvstore simulate trace.jsonl.gz --capacity 10000 --capacity 1000,10000
    """
    model = None if engine is None else _time_model(engine, kv_dtype, memory_link, disk_link)
    if plot is not None:
        _need_matplotlib()
    chosen = policies or NAMES
    traces = _traces(files, even_blocks)
    rows = _run(traces, chosen, sizes, count_from, model)
    if plot is not None:
        from kvstore.cli.hitplot import draw

        draw(rows, plot)
    if as_json:
        show.as_json([row.as_fields() for row in rows])
    else:
        _print(rows)
        if model is not None:
            _print_times(rows, model)


def _traces(paths: Sequence[Path], even_blocks: bool) -> list[tuple[str, list[Request]]]:
    """The requests of each trace, by its name."""
    traces = []
    try:
        for name, files in traces_in(paths):
            requests = read_trace(*files)
            if not any(request.asked for request in requests):
                raise click.ClickException(f"{name}: no request has `hash_ids`")
            traces.append((name, with_even_blocks(requests) if even_blocks else requests))
    except (TraceError, OSError) as error:
        raise click.ClickException(str(error)) from error
    return traces


def _time_model(engine: str, kv_dtype: str, memory_link: str, disk_link: str) -> TimeModel:
    """Of a known fit, with the KV of its model."""
    fit = catalogue.fit(engine)
    try:
        kv_bytes = catalogue.model(fit.model).shape.bytes_per_token(catalogue.dtype(kv_dtype))
    except BadRequest as error:
        raise click.UsageError(error.detail) from error
    rates = catalogue.link(memory_link).usable, catalogue.link(disk_link).usable
    return TimeModel(fit.name, fit.cost, kv_bytes, rates)


def _run(
    traces: Sequence[tuple[str, list[Request]]],
    policies: Sequence[str],
    sizes: Sequence[Size],
    count_from: int,
    model: TimeModel | None,
) -> list[Row]:
    from rich.console import Console
    from rich.progress import Progress

    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        total = sum(steps_of(len(trace), len(policies), len(sizes)) for _, trace in traces)
        task = progress.add_task("", total=total)

        def told(what: str, steps: int) -> None:
            progress.update(task, advance=steps, description=what)

        for name, requests in traces:
            rows += run_all(
                name,
                requests,
                policies,
                sizes,
                first_counted=count_from,
                time_model=model,
                progress=told,
            )
    return rows


def _print(rows: Sequence[Row]) -> None:
    headers = ("trace", "policy", "blocks", "hits", "memory", "disk", "optimum", "w/new", "w/hit")
    cells = []
    for row in rows:
        fields = row.as_fields()
        per_hit = row.figures.writes_per_hit
        cells.append(
            (
                row.trace,
                row.policy,
                row.size,
                f"{fields['prefix_token_hit_rate']:.1%}",
                f"{fields['memory_hit_rate']:.1%}",
                f"{fields['disk_hit_rate']:.1%}",
                f"{row.optimum_hit_rate:.1%}",
                f"{row.figures.writes_per_computed:.2f}" if row.size.disk_blocks else "-",
                "-" if per_hit is None else f"{per_hit:.2f}",
            )
        )
    show.columns(headers, cells, left=2)


def _print_times(rows: Sequence[Row], model: TimeModel) -> None:
    """Mean time to compute and load a prompt, as a fraction of computing it without a cache."""
    memory, disk = (f"{rate / 1e9:g} GB/s" for rate in model.bytes_per_second)
    click.echo(f"\ntime against no cache, {model.name}, memory {memory}, disk {disk}:")
    cells = []
    for row in rows:
        timing = row.timing
        assert timing is not None
        ways = (f"{timing.against_no_cache(way):.3f}" for way in WAYS)
        slower = (timing.slower[way] for way in WAYS)
        declined = timing.hit_tokens - timing.loaded_tokens[GATE]
        share = declined / timing.hit_tokens if timing.hit_tokens else 0.0
        cells.append((row.trace, row.policy, row.size, *ways, *slower, f"{share:.1%}"))
    headers = ("trace", "policy", "blocks", *WAYS, *(f"slower/{way}" for way in WAYS), "declined")
    show.columns(headers, cells, left=2)


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.UsageError("--plot needs matplotlib: install kvstore's extra `plot`") from error
