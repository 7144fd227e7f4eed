"""Spaces: (tenant, fingerprint) to an index of blocks, and which of them a session may see.

A space is OPEN (every session of the tenant), HELD (only the group that opened it, until a person
decides) or CLOSED. An OPEN one that is doubted is nobody's until a person decides: its blocks stay
where they are, and none is read, written or saved. Ids are never reused, so what was closed cannot
come back under an old id. Bookkeeping and judgement; closing a space drops its blocks in
`decisions`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvstore.core.leases import GroupKey, WriteGroup
from kvstore.core.pools import Pool, Slot
from kvstore.core.states import SPACE_MOVES, SpaceState
from kvstore.model.fingerprint import Difference, Fingerprint
from kvstore.model.layout import Layout
from kvstore.model.reasons import Reason

CLOSED_SPACES_MAX = 4_096
"""How many closed spaces are remembered, so that their users are told why."""

OPEN, HELD, CLOSED = SpaceState


class Space:
    """One space. group: who may see it while HELD. index: every name that is READY or FILLING.

    blocks: READY ones. pools: of its slot size, one a tier (None for archives). groups: write
    groups with unfinished blocks.
    """

    __slots__ = (
        "blocks",
        "closed_why",
        "doubted",
        "fingerprint",
        "group",
        "groups",
        "id",
        "index",
        "layout",
        "pools",
        "review_id",
        "state",
        "tenant",
        "used_ns",
    )

    def __init__(
        self,
        space_id: int,
        tenant: str,
        group: bytes,
        fingerprint: Fingerprint,
        layout: Layout,
        state: SpaceState,
        pools: list[Pool | None],
        now_ns: int,
    ) -> None:
        self.id = space_id
        self.tenant = tenant
        self.group = group
        self.fingerprint = fingerprint
        self.layout = layout
        self.state = state
        self.pools = pools
        self.index: dict[bytes, Slot] = {}
        self.groups: dict[tuple[int, bytes, int], WriteGroup] = {}
        self.blocks = 0
        self.doubted = False
        self.review_id = 0
        self.closed_why = Reason.MISS_INVALIDATED
        self.used_ns = now_ns

    @property
    def may_be_saved(self) -> bool:
        """Whether an archive may get blocks of it."""
        return self.state is OPEN and not self.doubted

    @property
    def state_word(self) -> str:
        """Its state as people are told it."""
        return HELD.value if self.doubted else self.state.value

    @property
    def block_bytes(self) -> int:
        """Bytes of READY blocks."""
        return self.blocks * self.layout.block_bytes

    def set_state(self, state: SpaceState) -> None:
        """Changes the state; only along `SPACE_MOVES`."""
        assert (self.state, state) in SPACE_MOVES, (self.state, state)
        self.state = state

    def visible_to(self, tenant: str, group: bytes) -> bool:
        """Whether a session may use it."""
        return (
            self.tenant == tenant
            and self.state is not CLOSED
            and not self.doubted
            and (self.state is OPEN or self.group == group)
        )


class Spaces:
    """All spaces that are not closed, by id and by what opens them; and the last closed ones."""

    def __init__(self) -> None:
        self._by_id: dict[int, Space] = {}
        self._by_name: dict[tuple[str, bytes, bytes], Space] = {}
        self._of_tenant: dict[str, dict[int, Space]] = {}
        self._closed: OrderedDict[int, tuple[str, Reason]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Space]:
        return iter(self._by_id.values())

    def get(self, space_id: int) -> Space | None:
        """The space with this id, if it is not closed."""
        return self._by_id.get(space_id)

    def find(self, tenant: str, digest: bytes, group: bytes) -> Space | None:
        """The space that this name opens; `group` is empty for an OPEN one."""
        return self._by_name.get((tenant, digest, group))

    def of_tenant(self, tenant: str) -> Iterator[Space]:
        """The spaces of a tenant."""
        return iter(self._of_tenant.get(tenant, {}).values())

    def held_by(self, group_key: GroupKey) -> list[Space]:
        """The held spaces of a group."""
        tenant, group = group_key
        return [s for s in self.of_tenant(tenant) if s.state is HELD and s.group == group]

    def add(self, space: Space) -> None:
        """A new space."""
        self._by_id[space.id] = space
        self._by_name[self._name(space)] = space
        self._of_tenant.setdefault(space.tenant, {})[space.id] = space

    def complete(self, space: Space, fingerprint: Fingerprint) -> None:
        """HELD -> OPEN under the completed fingerprint; the id stays."""
        del self._by_name[self._name(space)]
        space.set_state(OPEN)
        space.fingerprint = fingerprint
        space.group = b""
        self._by_name[self._name(space)] = space

    def remove(self, space: Space, why: Reason) -> None:
        """OPEN | HELD -> CLOSED."""
        del self._by_name[self._name(space)]
        del self._by_id[space.id]
        del self._of_tenant[space.tenant][space.id]
        space.set_state(CLOSED)
        space.closed_why = why
        self._closed[space.id] = (space.tenant, why)
        if len(self._closed) > CLOSED_SPACES_MAX:
            self._closed.popitem(last=False)

    def closed_why(self, space_id: int, tenant: str) -> Reason | None:
        """Why a space of this tenant was closed; None if it was not, or that is forgotten."""
        tenant_why = self._closed.get(space_id)
        return tenant_why[1] if tenant_why is not None and tenant_why[0] == tenant else None

    def nearest(
        self, tenant: str, fingerprint: Fingerprint, key: bytes | None = None
    ) -> tuple[Space, tuple[Difference, ...]] | None:
        """The OPEN space whose fingerprint differs in the fewest fields, but in some; with `key`
        only those that can be read for that key.
        """
        best: tuple[Space, tuple[Difference, ...]] | None = None
        for space in self.of_tenant(tenant):
            # The key first: fingerprints of a thousand spaces take a millisecond to compare.
            if key is not None and key not in space.index:
                continue
            if not space.may_be_saved or space.fingerprint == fingerprint:
                continue
            differences = space.fingerprint.differences(fingerprint)
            if best is None or len(differences) < len(best[1]):
                best = (space, differences)
        return best

    @staticmethod
    def _name(space: Space) -> tuple[str, bytes, bytes]:
        return space.tenant, space.fingerprint.digest, space.group
