"""Settings of evidence, and the digest by which settings are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config import load, render_toml
from kvstore.config.digest import settings_digest, settings_of
from kvstore.config.evidence import sampling_of
from kvstore.model.reasons import StartError
from kvstore.model.sampling import Sampling


def test_shares_and_salt_become_what_decides() -> None:
    settings = load(None, {}, {"serve.share": "0.25", "serve.salt": "sälz", "audit.share": "0.5"})
    assert sampling_of(settings.serve, settings.audit) == Sampling(0.25, 0.5, "sälz".encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("serve.share", "1.1"),
        ("serve.share", "-0.1"),
        ("serve.share", "nan"),
        ("audit.share", "2"),
        ("serve.salt", "ä" * 33),
    ],
)
def test_what_is_no_share_or_salt_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(StartError) as caught:
        load(None, {}, {name: value})
    assert caught.value.setting == name


def test_where_a_value_came_from_is_no_part_of_the_digest(tmp_path: Path) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text('[serve]\nshare = 0.5\nsalt = "a = b  # c"\n')
    flags = {"serve.share": "0.5", "serve.salt": "a = b  # c"}
    one, other = (render_toml(load(p, {}, f)) for p, f in ((str(file), {}), (None, flags)))
    assert one != other
    assert settings_digest(one) == settings_digest(other)
    assert settings_of(one)["serve.salt"] == '"a = b  # c"'
    assert settings_of(one)["tenants.default.mode"] == '"0600"'
    changed = render_toml(load(None, {}, {**flags, "serve.share": "0.6"}))
    assert settings_digest(changed) != settings_digest(one)
