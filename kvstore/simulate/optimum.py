"""The clairvoyant optimum: what nobody can beat, since it knows every later request.

Belady's rule on prompts: the block whose next request is farthest away leaves, of one prompt the
last first. A block's parent is never needed later than the block, so what is left is always a set
of prefixes. A block that would be needed later than everything resident is not stored. Computed
apart from the core, from the trace alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from kvstore.simulate.trace import Request


def hit_tokens(
    requests: Sequence[Request],
    capacity_blocks: int,
    first_counted: int = 0,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Tokens in leading hits under the optimum, from request `first_counted` on. progress: called
    with the number of each request that was served.
    """
    later = _next_requests(requests)
    resident: dict[int, int] = {}
    """Id to its next request."""
    heap: list[tuple[int, int, int]] = []
    """(-next request, -depth, id); what `resident` does not confirm is old."""
    tokens = 0
    for number, request in enumerate(requests):
        nexts = later[number]
        hit = 0
        while hit < len(request.ids) and request.ids[hit] in resident:
            hit += 1
        if request.asked and number >= first_counted:
            tokens += sum(request.block_tokens[:hit])
        for depth in range(hit):
            resident[request.ids[depth]] = nexts[depth]
        stored = hit
        for depth in range(hit, len(request.ids)):
            # The request's own blocks are not in the heap yet: they are nobody's victim.
            if len(resident) >= capacity_blocks and not _evict(resident, heap, nexts[depth]):
                break
            resident[request.ids[depth]] = nexts[depth]
            stored = depth + 1
        for depth in range(stored):
            heapq.heappush(heap, (-nexts[depth], -depth, request.ids[depth]))
        if len(heap) > 4 * len(resident) + 1024:
            heap = [entry for entry in heap if resident.get(entry[2]) == -entry[0]]
            heapq.heapify(heap)
        if progress is not None:
            progress(number)
    return tokens


def _evict(resident: dict[int, int], heap: list[tuple[int, int, int]], needed: int) -> bool:
    """Makes room for a block that is needed at request `needed`; False: nothing is needed later."""
    while heap:
        farthest, _, one = heap[0]
        if resident.get(one) != -farthest:
            heapq.heappop(heap)
            continue
        if needed >= -farthest:
            return False
        heapq.heappop(heap)
        del resident[one]
        return True
    return False


def _next_requests(requests: Sequence[Request]) -> list[list[int]]:
    """For each block of each request the number of the next request that has it."""
    never = len(requests)
    coming: dict[int, int] = {}
    later: list[list[int]] = [[] for _ in requests]
    for number in range(len(requests) - 1, -1, -1):
        ids = requests[number].ids
        later[number] = [coming.get(one, never) for one in ids]
        if requests[number].asked:  # what is stored without being asked for needs nothing
            coming.update(dict.fromkeys(ids, number))
    return later
