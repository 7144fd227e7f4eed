"""The shell around the pure core. `Store` is the daemon's one way to blocks; see `shell`."""

from kvstore.store.sessions import Session
from kvstore.store.shell import NS_PER_MS, Store
from kvstore.store.values import Leased, Mover, StoreStats

__all__ = ["NS_PER_MS", "Leased", "Mover", "Session", "Store", "StoreStats"]
