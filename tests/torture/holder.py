"""A client process that takes very many leases and keeps them: `python -m tests.torture.holder
SOCKET GROUP LEASES`. It says how many it holds, and ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from typing import Any

from kvstore.wire.v1 import store_pb2 as pb
from tests.e2e.stage import Prompt, model
from tests.rawclient import CALL_S, RawClient

IN_FLIGHT = 48
VIEW_EVERY = 50
"""Of the leases, one is a view."""


def main() -> None:
    path, group, leases = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])
    client = RawClient(path, group=group)
    space = client.open(model()).space_id
    prompt = Prompt(model(), int.from_bytes(group, "little") % (1 << 32), blocks=4)
    client.put(space, prompt.keys, prompt.rows())
    keys = b"".join(prompt.keys)
    flying: deque[Any] = deque()
    held = 0
    for number in range(leases):
        view = number % VIEW_EVERY == 0
        request = pb.AcquireRequest(
            session=client.secret,
            space_id=space,
            keys=keys,
            mode=pb.LEASE_MODE_VIEW if view else pb.LEASE_MODE_COPY,
        )
        flying.append(client.stub.Acquire.future(request, timeout=CALL_S))
        if len(flying) >= IN_FLIGHT:
            held += bool(flying.popleft().result().lease_id)
    held += sum(bool(call.result().lease_id) for call in flying)
    print(json.dumps({"held": held}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
