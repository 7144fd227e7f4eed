"""`kvstore plan`, the calculator: the size of a prompt's KV, its time over a link, and from which
length on loading it beats computing it. Needs no daemon."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from kvstore.cli import catalogue, show
from kvstore.cli.arguments import Number, read_json
from kvstore.cli.calculator import (
    Prompt,
    Row,
    prompt_of_bytes,
    prompt_of_config,
    prompt_of_model,
    row,
)
from kvstore.model.cost import PrefillCost
from kvstore.model.plan import Overlap, Plan
from kvstore.model.reasons import BadRequest, Reason
from kvstore.policy.cost import always_faster_bytes_per_second


@click.command(
    short_help="Calculate KV sizes and load times.",
    epilog="Sizes are binary (GiB), link rates decimal (GB/s) as vendors write them; a link of "
    "20GiB/s is understood, too.",
)
@click.option("--model", "model_name", metavar="NAME", help="A known model; see --list.")
@click.option(
    "--config", "config_file", type=click.File("r"), help="A model's Hugging Face config.json."
)
@click.option(
    "--kv-bytes", metavar="SIZE", help="Only so many bytes of KV, as 8GiB; no model is needed."
)
@click.option("--tokens", type=click.IntRange(1, 2**31), help="Tokens of the prompt.")
@click.option("--dtype", "kv_dtype", default="bfloat16", show_default=True, help="KV type: fp8.")
@click.option(
    "--link", "link_texts", multiple=True, metavar="NAME|RATE",
    help="A known link or a rate in GB/s; may be repeated. Default: all known links to read from.",
)  # fmt: skip
@click.option("--latency-us", type=Number(min=0), default=0.0, help="Of every link.")
@click.option("--prefill", "prefill_text", metavar="A,B", help="Cost: us/token, us/token^2.")
@click.option("--prefill-seed", metavar="NAME", help='A known fit, as "Llama-3.1-8B 1xH100".')
@click.option(
    "--overlap",
    type=click.Choice([overlap.value for overlap in Overlap]),
    default=Overlap.SERIAL.value,
    show_default=True,
    help="What the engine does at the same time.",
)
@click.option("--list", "list_names", is_flag=True, help="List known models, links and fits.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model_name: str | None,
    config_file: Any,
    kv_bytes: str | None,
    tokens: int | None,
    kv_dtype: str,
    link_texts: tuple[str, ...],
    latency_us: float,
    prefill_text: str | None,
    prefill_seed: str | None,
    overlap: str,
    list_names: bool,
    as_json: bool,
) -> None:
    """Calculate KV bytes, transfer times, and load against recompute.

    kvstore plan --model llama-3.1-8b --tokens 32000 --prefill-seed "Llama-3.1-8B 1xH100"
    """
    if list_names:
        _list(as_json)
        return
    prompt = _prompt(model_name, config_file, kv_bytes, tokens, catalogue.dtype(kv_dtype))
    cost = _cost(prefill_text, prefill_seed)
    if cost is not None and prompt.tokens == 0:
        raise click.UsageError("a prefill cost needs --tokens")
    speeds = [catalogue.link(text) for text in link_texts]
    speeds = speeds or [known for known in catalogue.links() if not known.writes]
    rows = [row(prompt, speed, latency_us, cost, Overlap(overlap)) for speed in speeds]
    if as_json:
        show.as_json(_as_fields(prompt, rows, cost))
    else:
        _print(prompt, rows, cost)


def _prompt(
    model_name: str | None,
    config_file: Any,
    kv_bytes: str | None,
    tokens: int | None,
    kv_dtype: str,
) -> Prompt:
    if sum(given is not None for given in (model_name, config_file, kv_bytes)) != 1:
        raise click.UsageError("give one of --model, --config and --kv-bytes (or --list)")
    if kv_bytes is not None:
        return prompt_of_bytes(_bytes(kv_bytes), tokens or 0)
    if tokens is None:
        raise click.UsageError("--tokens is needed: how long is the prompt?")
    try:
        if model_name is not None:
            return prompt_of_model(catalogue.model(model_name), tokens, kv_dtype)
        config = read_json(config_file, "--config")
        return prompt_of_config(config_file.name, config, tokens, kv_dtype)
    except BadRequest as error:
        raise click.UsageError(error.detail) from error


def _bytes(text: str) -> int:
    from kvstore.config import parse_size

    try:
        total_bytes = parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--kv-bytes") from error
    if total_bytes == 0:
        raise click.BadParameter("there is nothing to load", param_hint="--kv-bytes")
    return total_bytes


def _cost(prefill_text: str | None, prefill_seed: str | None) -> PrefillCost | None:
    if prefill_text is not None and prefill_seed is not None:
        raise click.UsageError("give one of --prefill and --prefill-seed")
    if prefill_text is not None:
        return catalogue.prefill(prefill_text)
    return None if prefill_seed is None else catalogue.fit(prefill_seed).cost


def _as_fields(prompt: Prompt, rows: list[Row], cost: PrefillCost | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        **dataclasses.asdict(prompt),
        "prefill": None if cost is None else cost._asdict(),
        "prefill_ms": None if cost is None else cost.prefill_us(prompt.tokens) / 1e3,
        "links": [],
    }
    if cost is not None and prompt.bytes_per_token:
        rate = always_faster_bytes_per_second(prompt.bytes_per_token, cost)
        fields["always_faster_bytes_per_second"] = _finite(rate)
    for answer in rows:
        usual = answer.usual
        fields["links"].append(
            {
                "name": answer.speed.name,
                "bytes_per_second": answer.speed.theory,
                "usable_bytes_per_second": answer.speed.usable,
                "ideal_ms": answer.ideal_ms,
                "load_ms": usual.load_ms,
                "recompute_ms": usual.recompute_ms,
                "total_ms": usual.split.total_ms,
                "recompute_tokens": usual.recompute_tokens,
                "break_even_tokens": _finite(answer.wins_from_tokens),
                **show.reason_fields(usual.reason),
            }
        )
    return fields


def _finite(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return "never" if value == float("inf") else value


def _print(prompt: Prompt, rows: list[Row], cost: PrefillCost | None) -> None:
    facts: dict[str, object] = {}
    if prompt.bytes_per_token:
        facts["model"] = f"{prompt.model} ({prompt.kind})"
        facts["KV a token"] = f"{prompt.bytes_per_token:,} bytes"
        if prompt.fixed_bytes:
            facts["fixed"] = f"{prompt.fixed_bytes:,} bytes of windows and state"
    if prompt.note:
        facts["note"] = prompt.note
    of = f" for {prompt.tokens:,} tokens" if prompt.tokens else ""
    facts["KV"] = f"{prompt.total_bytes:,} bytes ({show.size(prompt.total_bytes)}){of}"
    if cost is not None:
        a, b = cost
        facts["prefill"] = (
            f"{show.milliseconds(cost.prefill_us(prompt.tokens) / 1e3)} "
            f"(a {a:g} us/token, b {b:g} us/token^2)"
        )
    if cost is not None and prompt.bytes_per_token:
        rate = always_faster_bytes_per_second(prompt.bytes_per_token, cost)
        facts["always faster"] = f"from {rate / 1e9:.1f} GB/s on, whatever the length"
    show.pairs(facts)
    click.echo()
    headers = ["link", "advice", "GB/s", "ideal", "usable GB/s", "load"]
    if cost is not None:
        headers += ["recompute", "loading wins from"]
    show.columns(headers, [_cells(answer, cost is not None) for answer in rows], left=2)
    if cost is None:
        click.echo(f"\n{Reason.COST_UNKNOWN.name}: {Reason.COST_UNKNOWN.text}")
        hints = [fit.name for fit in catalogue.fits() if fit.model == prompt.model]
        if hints:
            click.echo(f'known for this model: --prefill-seed "{hints[0]}"'
                       + "".join(f', "{name}"' for name in hints[1:]))  # fmt: skip


def _cells(answer: Row, with_cost: bool) -> list[str]:
    usual = answer.usual
    cells = [
        answer.speed.name,
        _advice(usual),
        f"{answer.speed.theory / 1e9:.4g}",
        show.milliseconds(answer.ideal_ms),
        f"{answer.speed.usable / 1e9:.4g}",
        show.milliseconds(usual.load_ms),
    ]
    if with_cost:
        assert answer.wins_from_tokens is not None
        cells += [show.milliseconds(usual.recompute_ms), show.tokens(answer.wins_from_tokens)]
    return cells


def _advice(usual: Plan) -> str:
    if usual.reason is Reason.DECLINED_RECOMPUTE_FASTER:
        return "recompute"
    if usual.recompute_tokens:
        return f"load, recompute {usual.recompute_tokens:,}"
    return "load"


def _list(as_json: bool) -> None:
    if as_json:
        show.as_json(
            {
                "models": [known.name for known in catalogue.models()],
                "links": [dataclasses.asdict(known) for known in catalogue.links()],
                "prefill": [
                    {"name": known.name, **known.cost._asdict()} for known in catalogue.fits()
                ],
                "sources": catalogue.sources(),
            }
        )
        return
    show.columns(
        ("model", "kind", "bf16 bytes a token"),
        [(m.name, m.kind, f"{m.shape.bytes_per_token('bfloat16'):,}") for m in catalogue.models()],
        left=2,
    )
    click.echo()
    show.columns(
        ("link", "what", "GB/s", "usable"),
        [(k.name, k.what, f"{k.theory / 1e9:g}", f"{k.usable / 1e9:g}") for k in catalogue.links()],
        left=2,
    )
    click.echo()
    show.columns(
        ("prefill fit", "a us/token", "b us/token^2", "max error %"),
        [
            (f.name, f.cost.a_us_per_token, f.cost.b_us_per_token2, f.max_error_percent)
            for f in catalogue.fits()
        ],
    )
    click.echo()
    show.pairs(catalogue.sources())
