"""Settings without the names of tenants, for a report that others read. Pure.

A tenant's section is called as the metrics call the tenant. What is set in it may hold the name, as
the path of a socket does: those texts are digests, which tell whether they have changed and nothing
else; sizes stay. Comments say where a value came from, and are left out.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

__all__ = ["DEFAULT_TENANT", "masked", "tenant_digest"]

DEFAULT_TENANT: Final = "default"
DIGITS: Final = 12
_SECTION: Final = re.compile(r"^\[(?:tenants\.(?P<tenant>.+)|.+)\]$")
_PLAIN: Final = re.compile(r"^(?:mode|[a-z_]+_bytes) = ")
"""What a tenant is given, which no name is part of."""
_TEXT: Final = re.compile(r'^(?P<name>[a-z_]+) = "(?P<text>.+)"$')


def tenant_digest(name: str) -> str:
    """A tenant as the metrics call it: the first digits of the SHA-256 of its name."""
    return name if name == DEFAULT_TENANT else _digits(name)


def masked(toml: str) -> str:
    """Settings as `render_toml` has them, without names."""
    rows: list[str] = []
    tenant: str | None = None
    for row in toml.splitlines():
        value = row.rpartition("  # ")[0] or row
        section = _SECTION.match(value)
        if section is not None:
            tenant = section["tenant"]
            if tenant is not None:
                name = tenant.strip('"')
                value = f"[tenants.{tenant_digest(name)}]"
        elif tenant is not None and (text := _TEXT.match(value)) and not _PLAIN.match(value):
            value = f'{text["name"]} = "{_digits(text["text"])}"'
        if not value.startswith("#"):
            rows.append(value)
    return "\n".join(rows) + "\n"


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
