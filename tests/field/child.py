"""Client processes of the field cases: `python -m tests.field.child VERB ...`."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable

from tests.e2e.child import heard, say
from tests.e2e.stage import Child, Prompt, altered, model
from tests.field import content
from tests.rawclient import RawClient

__all__ = ["child"]


def child(*arguments: object, hash_seed: str = "") -> Child:
    """Starts one; with `hash_seed` as PYTHONHASHSEED."""
    prefix = ("env", f"PYTHONHASHSEED={hash_seed}") if hash_seed else ()
    return Child(*arguments, prefix=prefix, module="tests.field.child")


def golden(path: str, verb: str) -> None:
    """Puts or gets the 200 prompts of the golden keys, with and without salts and extras."""
    from kvstore_client import Client, ClientConfig
    from tests.golden import generate_model

    digest, blocks, done = hashlib.sha256(), 0, 0
    with Client(path, config=ClientConfig(deadline_ms=10_000)) as client:
        for seed in range(generate_model.PROMPTS):
            group = ("", "full", "window-\u00e9")[seed % 3]
            fingerprint = altered(model(), "geometry", cache_group=group)
            space = client.space(fingerprint)
            keys = space.keys(
                generate_model.prompt(seed),
                salt=(b"", b"salt")[seed % 2],
                extras=generate_model.extras_of(seed),
            )
            digest.update(b"".join(keys))
            blocks += len(keys)
            if verb == "put":
                done += content.push(space, fingerprint, keys)
            else:
                done += content.hit(space, fingerprint, keys)
        say(keys=digest.hexdigest(), blocks=blocks, done=done)
        heard()


def leases(path: str, count: str) -> None:
    """Takes so many leases of one block, and keeps them."""
    client = RawClient(path, group=f"leases-{os.getpid()}".encode())
    space = client.open(model()).space_id
    prompt = Prompt(model(), 19, blocks=1)
    client.put(space, prompt.keys, prompt.rows())
    ids: set[int] = set()
    while len(ids) < int(count):  # until another child has stored the block there is none
        ids |= {client.acquire(space, prompt.keys).lease_id} - {0}
    say(leases=len(ids))
    heard()


VERBS: dict[str, Callable[..., None]] = {"golden": golden, "leases": leases}

if __name__ == "__main__":
    assert os.environ.get("PYTHONPATH")
    VERBS[sys.argv[1]](*sys.argv[2:])
