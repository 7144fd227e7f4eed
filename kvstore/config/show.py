"""Shows settings to a person: the effective ones as loadable TOML, and what each means.

Pure. Callers: the daemon at its start, `kvstored config`, the admin service, whoever writes the
documentation.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any, NamedTuple, get_args

import msgspec

from kvstore.config.load import FIELDS, Field, env_name
from kvstore.config.settings import Settings, show_size


class Knob(NamedTuple):
    """A setting as documentation. `tenants.NAME.mode` stands for one of each tenant."""

    name: str
    env: str
    default: str  # in TOML
    accepts: str
    what: str
    when: str  # one would change it


def knobs() -> list[Knob]:
    """Every setting, in the order of the file."""
    found = []
    for section, fields in FIELDS.items():
        for field in fields.values():
            meta = _meta(field)
            name = (
                f"tenants.NAME.{field.name}" if section == "tenants" else f"{section}.{field.name}"
            )
            found.append(
                Knob(
                    name=name,
                    env=env_name(name),
                    default=_toml_value(field, field.default),
                    accepts=_accepts(field, meta),
                    what=meta.description or "",
                    when=(meta.extra or {})["when"],
                )
            )
    return found


def explain() -> str:
    """What every setting is, for a terminal."""
    lines = []
    for one in knobs():
        lines.append(f"{one.name} = {one.default}")
        lines += textwrap.wrap(one.what, 100, initial_indent="    ", subsequent_indent="    ")
        lines += textwrap.wrap(
            f"Change it when {one.when}", 100, initial_indent="    ", subsequent_indent="    "
        )
        lines += [f"    {one.accepts}; environment {one.env}", ""]
    return "\n".join(lines)


def render_toml(settings: Settings) -> str:
    """The effective settings as a TOML file; comments tell where each value came from."""
    lines: list[str] = []
    for section, fields in FIELDS.items():
        if section != "tenants":
            lines += _render_table(section, fields, getattr(settings, section), settings.origins)
            continue
        for tenant, values in settings.tenants.items():
            lines += _render_table(f"tenants.{tenant}", fields, values, settings.origins)
    return "\n".join(lines)


def _render_table(
    table: str, fields: dict[str, Field], values: msgspec.Struct, origins: dict[str, str]
) -> list[str]:
    lines = [f"[{table}]"]
    for field in fields.values():
        value = _toml_value(field, getattr(values, field.name))
        lines.append(f"{field.name} = {value}  # {origins.get(f'{table}.{field.name}', 'default')}")
    return [*lines, ""]


def _toml_value(field: Field, value: Any) -> str:
    if field.is_size and value:
        return f'"{show_size(value)}"'
    # A JSON string is a TOML basic string: control characters are refused when a value is loaded.
    return json.dumps(value)


def _meta(field: Field) -> msgspec.Meta:
    meta: msgspec.Meta = field.hint.__metadata__[0]
    return meta


def _accepts(field: Field, meta: msgspec.Meta) -> str:
    choices = get_args(get_args(field.hint)[0])
    if choices:
        return "one of " + ", ".join(choices)
    if field.is_size:
        return "a size such as 512MiB or 4GiB"
    kind = {bool: "true or false", int: "whole number", float: "number", str: "text"}[field.kind]
    low = f" from {_exact(meta.ge)}" if meta.ge is not None else ""
    high = f" to {_exact(meta.le)}" if meta.le is not None else ""
    return kind + low + high


def _exact(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)
