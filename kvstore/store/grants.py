"""Which lease a call was granted, by the number that its caller gave the call.

A caller who did not hear the answer knows no lease: he gives back by that number what he was
granted, or will be, if the call is still on its way. One instance a session.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.model.reasons import KVStoreError, Reason

CALLS_MAX = 4_096
"""Calls of a session that are remembered, the latest ones."""
GIVEN_UP = 0


class Grants:
    """See the module's docstring. A nonce of 0 is none."""

    def __init__(self) -> None:
        self._leases: OrderedDict[int, int] = OrderedDict()

    def check(self, nonce: int) -> None:
        """KVStoreError(CANCELLED) if the caller has given this call up."""
        if nonce and self._leases.get(nonce) == GIVEN_UP:
            raise KVStoreError(Reason.CANCELLED, "the caller has given this call up")

    def note(self, nonce: int, lease_id: int) -> None:
        """The call was granted this lease."""
        if nonce and lease_id:
            self._keep(nonce, lease_id)

    def give_up(self, nonce: int) -> int:
        """The caller will not hear the answer. The lease to be ended, 0 if there is none yet."""
        lease_id = self._leases.get(nonce, GIVEN_UP)
        if nonce:
            self._keep(nonce, GIVEN_UP)
        return lease_id

    def _keep(self, nonce: int, lease_id: int) -> None:
        self._leases[nonce] = lease_id
        if len(self._leases) > CALLS_MAX:
            self._leases.popitem(last=False)
