"""Transfers by layers: the copying behind a handle, and the handles of the client for threads.

    with space.fetch_layers(hit, out) as fetch:      # out: one array a layer, [blocks, ...]
        for layer, array in enumerate(out):
            if fetch.wait(layer) < fetch.blocks:     # before its bytes are used
                ...                                  # a miss: begin anew, without them
            compute(layer, array)

    with space.push_layers(prompt, deadline_ms=30_000) as push:
        for layer in range(push.layers):
            push.put(layer, compute(layer))          # unchanged until the commit
        pushed = push.commit()

The copies run in the client's own threads, without the interpreter lock; nothing here raises
because of the store. A forked child's handle is a miss; the parent's goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from kvstore.model.fingerprint import Difference
from kvstore.model.reasons import BadRequest, KVStoreError, Reason
from kvstore_client import layer_reads
from kvstore_client.calls import SpaceSpec
from kvstore_client.layer_reads import LayerLease, LayerRequest
from kvstore_client.layer_writes import LayerPushing
from kvstore_client.reads import Copied
from kvstore_client.results import Fetched, Pushed
from kvstore_client.root import Prepared, Root
from kvstore_client.session import Deadline

__all__ = ["LayerCopying", "LayerFetch", "LayerPush"]

GRACE_S = 0.05
"""The copying keeps its deadline by itself; this long after it one that is stuck in line ends."""


class LayerCopying:
    """What both clients' handles of a fetch stand on. For several threads.

    held: what is to be copied, None: nothing. finish: makes the result.
    """

    def __init__(
        self,
        root: Root,
        spec: SpaceSpec,
        request: LayerRequest,
        deadline: Deadline,
        held: LayerLease | Copied,
        finish: Callable[[Copied], Fetched],
    ) -> None:
        done = held.done if isinstance(held, LayerLease) else held
        self.layers = len(request.targets)
        self.blocks = done.blocks
        self.deadline = deadline
        self._root, self._spec, self._request = root, spec, request
        self._held = held if isinstance(held, LayerLease) else None
        self._first = done
        self._finish = finish
        self._changed = threading.Condition()
        self._good: list[int] = []
        self._result: Fetched | None = None
        self._future: Future[None] | None = None
        self._stopped = False
        self._listeners: set[Callable[[], object]] = set()
        self._pid = os.getpid()

    def start(self) -> None:
        """Begins to copy, in a thread of the client."""
        held = self._held
        if held is None or not self.blocks:
            self._end(self._first)
            return
        try:
            self._future = self._root.workers().submit(self._work)
        except (KVStoreError, RuntimeError) as error:  # closed, or no thread to be had
            self._end(Copied(reason=Reason.UNAVAILABLE, detail=str(error)))

    def _work(self) -> None:
        held, self._held = self._held, None
        assert held is not None

        def failed(reason: Reason, detail: str, _: tuple[Difference, ...]) -> Copied:
            return Copied(reason=reason, detail=detail)

        done = Copied(reason=Reason.INTERNAL)
        try:
            prepared = Prepared(
                lambda context: layer_reads.copy(
                    context, self._spec, self._request, held, self._reached, self._may_go_on
                ),
                failed,
            )
            done = self._root.run(prepared, self.deadline)
        except KVStoreError as closed:
            done = Copied(reason=Reason.UNAVAILABLE, detail=closed.detail)
        finally:
            held.end()
            self._end(done)

    def _may_go_on(self) -> bool:
        return not self._stopped

    def _reached(self, layers: int, blocks: int) -> None:
        with self._changed:
            self._good += [blocks] * (layers - len(self._good))
        self._tell()

    def _end(self, done: Copied) -> None:
        with self._changed:
            if self._result is None:
                self._result = self._finish(done)
        held, self._held = self._held, None
        if held is not None:
            held.end()
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
            listeners = list(self._listeners)
        for heard in listeners:
            heard()

    # ---------------------------------------------------------------- for the handles

    def _inherited(self) -> Fetched | None:
        """In a forked child: nothing is copied here."""
        if os.getpid() == self._pid:
            return None
        why = "the fetch belongs to the process that was forked"
        return self._finish(Copied(reason=Reason.UNAVAILABLE, detail=why))

    def checked(self, layer: object) -> int:
        """BadRequest if it is no layer."""
        if type(layer) is not int or not 0 <= layer < self.layers:
            raise BadRequest(
                Reason.BAD_PART, f"layer is an int from 0 to {self.layers - 1}", "layer"
            )
        return layer

    def blocks_of(self, layer: int) -> int | None:
        """Good blocks of a layer; None: not known yet."""
        if self._inherited() is not None:
            return 0
        with self._changed:
            return self._known(layer)

    def _known(self, layer: int) -> int | None:
        if layer < len(self._good):
            return self._good[layer]
        return None if self._result is None else 0

    def result(self) -> Fetched | None:
        """None: it has not ended."""
        inherited = self._inherited()
        if inherited is not None:
            return inherited
        with self._changed:
            return self._result

    def wait(self, layer: int) -> int:
        """Good blocks of a layer, 0 for one that is not there by the deadline."""
        if self._inherited() is not None:
            return 0
        with self._changed:
            self._changed.wait_for(
                lambda: self._known(layer) is not None, self.deadline.left_s() + GRACE_S
            )
            return self._known(layer) or 0

    def wait_end(self) -> Fetched:
        """Waits until it has ended, at most until the deadline: then it is ended."""
        if self._inherited() is None:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._result is not None, self.deadline.left_s() + GRACE_S
                )
        return self.close()

    def stop(self) -> None:
        """Copies no further piece. From any thread, a finalizer included."""
        self._stopped = True

    def close(self) -> Fetched:
        """Ends it; when this returns nothing is written any more."""
        inherited = self._inherited()
        if inherited is not None:
            return inherited
        self.stop()
        if self._future is None or self._future.cancel():
            late = Reason.DEADLINE_EXCEEDED if self.deadline.passed else Reason.CANCELLED
            self._end(Copied(reason=late))
        with self._changed:
            self._changed.wait_for(lambda: self._result is not None)
            assert self._result is not None
            return self._result

    def listen(self, heard: Callable[[], object]) -> None:
        """Has `heard` called after each change, in the copying thread, until `unlisten`."""
        with self._changed:
            self._listeners.add(heard)

    def unlisten(self, heard: Callable[[], object]) -> None:
        with self._changed:
            self._listeners.discard(heard)


class LayerFetch:
    """A fetch that is under way. Made by `Space.fetch_layers`; for several threads.

    blocks: the leading run that is being copied; 0 for a miss, whose reason is in `result`.
    layers: how many arrays it fills.
    """

    def __init__(self, copying: LayerCopying) -> None:
        self._copying = copying
        copying.start()
        self.blocks = copying.blocks
        self.layers = copying.layers

    def wait(self, layer: int) -> int:
        """Waits for a layer (its place in `out`), at most until the deadline. How many leading
        blocks of it are there and verified, with their bytes in all layers before: `blocks`, or
        less from where on it has become a miss. Never more than of the layer before.
        """
        return self._copying.wait(self._copying.checked(layer))

    def result(self) -> Fetched:
        """Waits for the end, at most until the deadline. `blocks`: what is good in all layers."""
        return self._copying.wait_end()

    def close(self) -> None:
        """Ends it where it is: `out` is not written any more, the lease is given back."""
        self._copying.close()

    def __enter__(self) -> LayerFetch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        copying = getattr(self, "_copying", None)
        if copying is not None:
            copying.stop()


class LayerPush:
    """A push that is being filled. Made by `Space.push_layers`; for one thread at a time.

    wanted: numbers of the blocks that will be stored; the others are there, being written by
    somebody else, or found no room. layers: how many have to be put.
    """

    def __init__(self, pushing: LayerPushing) -> None:
        self._pushing = pushing
        self.wanted = pushing.wanted
        self.layers = pushing.layers

    def put(self, layer: int, data: Any) -> None:
        """Hands a layer over, in any order, each once; returns at once.

        data: array or tensor (of the CPU or a GPU) of any strides, [blocks - first_block, ...] with
            the layer's bytes (this rank's K and V) in each row; of the CPU a flat buffer of rows,
            too. Not to be changed before `commit` or `close` returns. What comes after the
            deadline, or when limits.lease_ttl_ms of the daemon is over, is not copied: nothing is
            stored then.
        BadRequest for a layer that is none or was put, and for data of another size.
        """
        self._pushing.put(layer, data)

    def commit(self) -> Pushed:
        """Stores the blocks, all at once. BadRequest while a layer is missing."""
        return self._pushing.commit()

    def close(self) -> None:
        """Gives the reservation up unless it was committed; `data` is not read any more."""
        self._pushing.close()

    def __enter__(self) -> LayerPush:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
