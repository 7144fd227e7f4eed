"""The client of kvstore: looks up, fetches and pushes KV blocks, and never harms its engine.

`Client` is for threads, `AsyncClient` for asyncio. Engine adapters are in `kvstore_client.engines`,
fakes for tests in `kvstore_client.testing`. Importing this loads neither torch nor the daemon.
"""

from kvstore.model.cost import PrefillCost
from kvstore.model.fingerprint import (
    Difference,
    Encoding,
    Fingerprint,
    Geometry,
    Identity,
    Placement,
    Verdict,
    attention_kind,
)
from kvstore.model.keys import BlockKey, ContentItem, Extras, array_digest
from kvstore.model.reasons import BadRequest, KVStoreError, Origin, Reason, Unavailable
from kvstore_client.aio import AsyncClient, AsyncSpace
from kvstore_client.aio_layers import AsyncLayerFetch, AsyncLayerPush
from kvstore_client.client import Client, Space
from kvstore_client.config import ClientConfig
from kvstore_client.layers import LayerFetch, LayerPush
from kvstore_client.results import (
    Compared,
    Connection,
    Fetched,
    Hit,
    KeyExplanation,
    LoadAdvice,
    PoolUse,
    Presence,
    Pushed,
    Rank,
    SpaceStatus,
)
from kvstore_client.tolerance import Tolerance
from kvstore_client.views import Views

__all__ = [
    "AsyncClient",
    "AsyncLayerFetch",
    "AsyncLayerPush",
    "AsyncSpace",
    "BadRequest",
    "BlockKey",
    "Client",
    "ClientConfig",
    "Compared",
    "Connection",
    "ContentItem",
    "Difference",
    "Encoding",
    "Extras",
    "Fetched",
    "Fingerprint",
    "Geometry",
    "Hit",
    "Identity",
    "KVStoreError",
    "KeyExplanation",
    "LayerFetch",
    "LayerPush",
    "LoadAdvice",
    "Origin",
    "Placement",
    "PoolUse",
    "PrefillCost",
    "Presence",
    "Pushed",
    "Rank",
    "Reason",
    "Space",
    "SpaceStatus",
    "Tolerance",
    "Unavailable",
    "Verdict",
    "Views",
    "array_digest",
    "attention_kind",
]
