"""Computes the golden vectors of keys and fingerprints: `python tests/golden/generate_model.py
[--write]`.

Without --write it prints them as JSON. Needs the standard library only, so that any interpreter can
compare. The files change only together with a new domain tag (kvstore/key/2): data stored under the
old ones is then unreachable.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from array import array
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvstore.model import fingerprint as fp  # noqa: E402
from kvstore.model.keys import (  # noqa: E402
    ContentItem,
    Extras,
    array_digest,
    chain,
    chain_digests,
    root_key,
)

PROMPTS = 200
IMAGE = bytes(range(32))
ADAPTER = bytes(range(100, 132))


def prompt(seed: int) -> list[int]:
    """Token ids of a length from 0 to 3 blocks + 1, by a linear congruence: no library's random
    numbers.
    """
    state, tokens = seed * 2_654_435_761 % 2**32, []
    for _ in range(seed % 50):
        state = (1_664_525 * state + 1_013_904_223) % 2**32
        tokens.append(state)
    return tokens


def extras_of(seed: int) -> Extras | None:
    """Absent, empty, an adapter, an image, both, or embeddings over the whole prompt."""
    image = ContentItem(IMAGE, seed % 20, 1 + seed % 30)
    return (
        None,
        Extras(),
        Extras(adapter_digest=ADAPTER),
        Extras(items=(image,)),
        Extras(adapter_digest=ADAPTER, items=(image, ContentItem(IMAGE[::-1], 17, 3))),
        Extras(items=(ContentItem(IMAGE, 0, 64),), content_in_tokens=False),
    )[seed % 6]


def keys() -> dict[str, Any]:
    """Keys of 200 prompts and of the other entry points, as hex."""
    prompts = []
    for seed in range(PROMPTS):
        salt = (b"", b"salt")[seed % 2]
        group = ("", "full", "window-\u00e9")[seed % 3]
        made = chain(prompt(seed), 16, salt=salt, cache_group=group, extras=extras_of(seed))
        prompts.append([key.hex() for key in made])
    return {
        "root": {
            "plain": root_key(b"", "").hex(),
            "salted": root_key(b"salt", "full").hex(),
        },
        "counting": [key.hex() for key in chain(list(range(64)), 16)],
        "largest": [key.hex() for key in chain([2**32 - 1] * 4, 4)],
        "prompts": prompts,
        "engine_digests": [
            key.hex()
            for key in chain_digests([IMAGE, ADAPTER], salt=b"salt", adapter_digest=ADAPTER)
        ],
        "array_digests": {
            "bytes": array_digest(bytes(range(10))).hex(),
            "int64": array_digest(array("q", [1, -2, 3])).hex(),
            "labelled": array_digest(bytes(range(10)), "RGB").hex(),
        },
    }


def fingerprints() -> dict[str, Any]:
    """Digests of three fingerprints and of each change of one field of the first."""
    plain = fp.Fingerprint(
        fp.Identity("model/a", "rev-1", 3, "adapter", "sha256:aa", "sha256:cc"),
        fp.Geometry("gqa", 32, 8, 128, cache_group="full", window_tokens=0),
        fp.Encoding(
            "bfloat16", 16, fp.ORDER_HEADS, fp.UNIT_SCALES, "1", "flash", fp.NO_CPU_ISA, "raw"
        ),
        fp.Placement(2, 1, 1),
    )
    latent = fp.Fingerprint(
        fp.Identity("mod\u00e8le \U0001f600", "rev-2", 0, config_digest="sha256:dd"),
        fp.Geometry("mla", 61, 1, 0, kv_latent_size=512, rope_size=64),
        fp.Encoding("float8_e4m3fn", 64, fp.ORDER_LATENT, "sha256:ee"),
    )
    held = fp.Fingerprint(
        fp.Identity("model/a"), fp.Geometry("mha", 2, 4, 8), fp.Encoding("float32", 16)
    )
    groups: tuple[Any, ...] = plain.groups()
    replace: Any = dataclasses.replace
    changed = {
        f"{group.GROUP}.{field.name}": replace(
            plain, **{group.GROUP: replace(group, **{field.name: other})}
        ).digest.hex()
        for group in groups
        for field in dataclasses.fields(group)
        for other in [_other(f"{group.GROUP}.{field.name}", getattr(group, field.name))]
        if other is not None
    }
    return {
        name: {
            "fields": value.to_dict(),
            "digest": value.digest.hex(),
            "groups": {group: digest.hex() for group, digest in value.group_digests().items()},
            "missing": list(value.missing()),
        }
        for name, value in (("plain", plain), ("latent", latent), ("held", held))
    } | {"changed": changed}


def _other(field: str, value: str | int | None) -> str | int | None:
    """Another legal value for a field; None for the latent sizes, which have one legal value
    outside MLA.
    """
    if field in ("geometry.kv_latent_size", "geometry.rope_size"):
        return None
    special = {"geometry.attention": "mha", "encoding.kv_dtype": "float16"}
    return special.get(field, value + 1 if isinstance(value, int) else "other")


def main() -> None:
    """Prints both files as one JSON object, or writes them."""
    made = {"keys.json": keys(), "fingerprints.json": fingerprints()}
    if sys.argv[1:] == ["--write"]:
        for name, content in made.items():
            text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=True)
            (Path(__file__).parent / name).write_text(text + "\n", encoding="ascii")
    else:
        print(json.dumps(made, sort_keys=True))


if __name__ == "__main__":
    main()
