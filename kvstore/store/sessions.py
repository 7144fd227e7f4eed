"""Sessions as the wire knows them: a secret, a tenant, a group, and whether a process stands behind
it. What they hold is the core's affair.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass, field

from kvstore.store.grants import Grants
from kvstore.store.withheld import Withheld

SECRET_BYTES = 16


@dataclass(slots=True)
class Session:
    """One client connection. `id` is the core's; `secret` names it on the wire."""

    id: int
    secret: bytes
    tenant: str
    group: bytes
    engine_id: str
    client_name: str
    opened_ns: int
    fd_bound: bool = False
    """A process with an fd socket stands behind it: that is its life, not the Attach stream."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    grants: Grants = field(default_factory=Grants)
    withheld: Withheld = field(default_factory=Withheld)


class Sessions:
    """All sessions, by id and by secret."""

    def __init__(self) -> None:
        self._by_id: dict[int, Session] = {}
        self._by_secret: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(
        self,
        session_id: int,
        *,
        tenant: str,
        group: bytes,
        engine_id: str,
        client_name: str,
        now_ns: int,
    ) -> Session:
        """A new session with a secret of its own."""
        session = Session(
            session_id,
            secrets.token_bytes(SECRET_BYTES),
            tenant,
            group,
            engine_id,
            client_name,
            now_ns,
        )
        self._by_id[session.id] = session
        self._by_secret[_digest(session.secret)] = session
        return session

    def by_secret(self, secret: bytes, tenant: str) -> Session | None:
        """The session of this tenant with this secret. The table sees a digest of it, so that the
        time of a look tells nothing about secrets that exist.
        """
        session = self._by_secret.get(_digest(secret))
        return session if session is not None and session.tenant == tenant else None

    def remove(self, session_id: int) -> Session | None:
        """Ends a session; None if it is over already."""
        session = self._by_id.pop(session_id, None)
        if session is not None:
            del self._by_secret[_digest(session.secret)]
            session.ended.set()
        return session


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
