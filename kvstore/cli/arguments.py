"""Arguments that several commands take, checked before anything is sent.

What no message can carry (a number beyond 64 bits, text that is not Unicode) and what is no number
at all is wrong usage. Callers: the commands.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import click

ID = click.IntRange(1, 2**64 - 1)
"""Of a space, a pin, a review."""


class Number(click.FloatRange):
    """A float in a range that is neither infinite nor NaN, which no bound keeps out."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


def read_json(file: Any, option: str) -> Any:
    """The document in an open text file. UsageError naming the option if it is none."""
    try:
        return json.load(file)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, digits or depth without end
        raise click.UsageError(f"{option}: {file.name} is no JSON: {error}") from error


def check_texts(arguments: Mapping[str, Any]) -> None:
    """UsageError naming the first argument with bytes that are no UTF-8: no message carries it."""
    for name, value in arguments.items():
        for text in value if isinstance(value, tuple) else (value,):
            try:
                if isinstance(text, str):
                    text.encode()
            except UnicodeEncodeError:
                raise click.UsageError(f"{name} is not UTF-8: {text!a}") from None
