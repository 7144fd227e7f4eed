"""The access log: one line for each prompt an engine asks for, out of the records of its calls.

Pure. An engine looks a prompt up, loads it, perhaps in several calls, and stores it: that is one
access. `Prompts` joins the calls; `line` writes what is left in the block traces' format, so that
`kvstore simulate` replays it. Promises: no token and no key is in a line; block ids and the
tenant's name are digests under a salt that is not in the file, so that who has the file can neither
look a block up nor try a prompt out. Equal ids are equal blocks of one tenant, fingerprint and
salt.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

from kvstore.model.record import KEY_BYTES, Record

__all__ = ["GETS", "PUTS", "SALT_BYTES", "Access", "Prompts", "Space", "line"]

GETS: Final = frozenset({"lookup", "acquire", "fetch"})
PUTS: Final = frozenset({"reserve", "push"})

SALT_BYTES: Final = 32
ID_BITS: Final = 53
"""What every reader of JSON can hold as a whole number."""
TENANT_DIGITS: Final = 12
JOIN_S: Final = 600.0
"""So long after the last call of a prompt another one may belong to it: prefill may be queued."""
LOOK_AGAIN_S: Final = 10.0
"""So soon an equal look-up is the same engine asking for the same request once more."""
PROMPTS_MAX: Final = 256
"""Prompts of one engine and space under way that are remembered."""
SCOPES_MAX: Final = 1_024


class Space(NamedTuple):
    """What a line says of the blocks. digest: of the fingerprint. block_bytes: of one block."""

    digest: bytes
    block_bytes: int


class Access(NamedTuple):
    """One line to be. keys: packed, from the prompt's first block on. hit_tokens: in leading blocks
    that were there. stored: nobody asked for it before it was stored, as for what was generated.
    """

    at_ms: int
    tenant: str
    space: Space
    keys: bytes
    block_tokens: int
    prompt_tokens: int
    hit_tokens: int
    stored: bool


class _Open:
    """A prompt under way. read: blocks of it that were loaded, as far as is known."""

    __slots__ = ("at_s", "keys", "read", "request_id", "written")

    def __init__(self, keys: bytes, request_id: str, at_s: float) -> None:
        self.keys = keys
        self.request_id = request_id
        self.at_s = at_s
        self.read = 0
        self.written = False

    def may_be(self, record: Record, within_s: float) -> bool:
        """Whether a call of now may be of this prompt: by the engine's own id where both have
        one.
        """
        if record.wall_s - self.at_s > within_s:
            return False
        return not (record.request_id and self.request_id) or self.named(record)

    def named(self, record: Record) -> bool:
        return bool(self.request_id) and self.request_id == record.request_id

    def join(self, record: Record) -> None:
        self.at_s = record.wall_s
        self.request_id = self.request_id or record.request_id


class Prompts:
    """See the module's docstring. Belongs to one thread."""

    def __init__(self) -> None:
        self._scopes: dict[tuple[str, str, int], deque[_Open]] = {}
        self._last_ms = 0

    def note(self, record: Record, space: Space) -> Access | None:
        """What a call adds to the log; None: it belongs to an access that is in it. A record
        without keys, or of a verb that is none of `GETS` and `PUTS`, adds nothing.
        """
        if not record.keys or not (record.verb in GETS or record.verb in PUTS):
            return None
        scope = record.tenant, record.engine_id, record.space_id
        prompts = self._scopes.pop(scope, None)
        if prompts is None:
            prompts = deque(maxlen=PROMPTS_MAX)
            if len(self._scopes) >= SCOPES_MAX:
                del self._scopes[next(iter(self._scopes))]
        self._scopes[scope] = prompts  # at the end: the one that was idle longest goes first
        if record.verb in PUTS:
            new = _put(prompts, record)
        elif record.verb == "lookup":
            new = _look(prompts, record)
        else:
            new = _load(prompts, record)
        return self._access(record, space) if new else None

    def _access(self, record: Record, space: Space) -> Access:
        # Calls end in another order than they began, and the date may be set back.
        self._last_ms = max(self._last_ms, round(record.wall_s * 1e3))
        tokens = record.handed_on * (record.block_tokens if record.unit == "blocks" else 1)
        stored = record.verb in PUTS
        return Access(
            self._last_ms,
            record.tenant,
            space,
            record.keys,
            record.block_tokens,
            record.prompt_tokens,
            0 if stored else tokens,
            stored,
        )


def _look(prompts: deque[_Open], record: Record) -> bool:
    for prompt in _latest(prompts):
        if not prompt.keys.endswith(record.keys) or not prompt.may_be(record, LOOK_AGAIN_S):
            continue
        if len(prompt.keys) > len(record.keys):
            prompt.join(record)  # what is left of a prompt that is loaded piece by piece
            return False
        if prompt.named(record) or not (prompt.read or prompt.written):
            prompt.join(record)
            return False
        break  # it was served: this is another request for the same prompt
    prompts.append(_Open(record.keys, record.request_id, record.wall_s))
    return True


def _load(prompts: deque[_Open], record: Record) -> bool:
    for prompt in _latest(prompts):
        if not prompt.may_be(record, JOIN_S):
            continue
        first = _place(prompt.keys, record.keys)
        # What was loaded before is asked for again: for another request.
        if first is None or (first < prompt.read and not prompt.named(record)):
            continue
        prompt.read = first + _read(record)
        prompt.join(record)
        return False
    prompt = _Open(record.keys, record.request_id, record.wall_s)
    prompt.read = _read(record)
    prompts.append(prompt)
    return True


def _read(record: Record) -> int:
    """Blocks that the engine does not ask for again: those that it was given, of a prompt that is
    loaded piece by piece; all of them where it was given none.
    """
    return record.handed_on or len(record.keys) // KEY_BYTES


def _put(prompts: deque[_Open], record: Record) -> bool:
    for prompt in _latest(prompts):
        if not prompt.may_be(record, JOIN_S):
            continue
        longer = record.keys.startswith(prompt.keys) and len(record.keys) > len(prompt.keys)
        if not longer and _place(prompt.keys, record.keys) is None:
            continue
        prompt.join(record)
        prompt.written = True
        if longer:
            prompt.keys = record.keys
        return longer
    prompt = _Open(record.keys, record.request_id, record.wall_s)
    prompt.written = True
    prompts.append(prompt)
    return True


def _latest(prompts: deque[_Open]) -> Iterator[_Open]:
    return reversed(prompts)


def _place(whole: bytes, part: bytes) -> int | None:
    """At which block `part` begins in `whole`; None if it is not all there."""
    if whole.startswith(part):
        return 0
    at = whole.find(part[:KEY_BYTES])
    if at < 0 or at % KEY_BYTES or not whole.startswith(part, at):
        return None
    return at // KEY_BYTES


def line(access: Access, salt: bytes) -> str:
    """The access as a line of JSON, without the line's end. salt: `SALT_BYTES` bytes."""
    tokens = len(access.keys) // KEY_BYTES * access.block_tokens
    fields = {
        "timestamp": access.at_ms,
        "input_length": max(access.prompt_tokens, tokens),
        "output_length": 0,
        "hash_ids": _ids(access, salt),
        "tokens_per_block": access.block_tokens,
        "block_bytes": access.space.block_bytes,
        "tenant": _digest(salt, b"tenant", access.tenant.encode()).hex()[:TENANT_DIGITS],
        "verb": "put" if access.stored else "get",
    }
    if not access.stored:
        fields["hit_tokens"] = access.hit_tokens
    return json.dumps(fields, separators=(",", ":"))


def _ids(access: Access, salt: bytes) -> list[int]:
    """A number under 2^53 for each block."""
    whose = blake2b(access.space.digest, key=salt, digest_size=8, person=b"block")
    whose.update(len(access.tenant.encode()).to_bytes(8, "little") + access.tenant.encode())
    keys, ids = access.keys, []
    for at in range(0, len(keys) - KEY_BYTES + 1, KEY_BYTES):
        one = whose.copy()
        one.update(keys[at : at + KEY_BYTES])
        ids.append(int.from_bytes(one.digest(), "little") >> (64 - ID_BITS))
    return ids


def _digest(salt: bytes, what: bytes, text: bytes) -> bytes:
    return blake2b(text, key=salt, digest_size=8, person=what).digest()
