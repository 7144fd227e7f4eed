"""Settings as they were rendered, taken apart again: by name, and as one digest.

What a value came from (a file, the environment) is a comment, and no part of either.
"""

from __future__ import annotations

import hashlib


def settings_of(toml: str) -> dict[str, str]:
    """Dotted names and values as `render_toml` has them."""
    found: dict[str, str] = {}
    section = ""
    for row in map(str.strip, toml.splitlines()):
        if row.startswith("["):
            section = row.strip("[]")
        elif "=" in row and not row.startswith("#"):
            name, _, value = row.partition(" = ")
            found[f"{section}.{name}"] = value.rpartition("  # ")[0] or value
    return found


def settings_digest(toml: str) -> str:
    """ "sha256:" and the digest of names and values."""
    rows = "".join(f"{name} = {value}\n" for name, value in sorted(settings_of(toml).items()))
    return f"sha256:{hashlib.sha256(rows.encode()).hexdigest()}"
