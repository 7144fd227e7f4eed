"""What an engine's configuration may say to the store's adapter in it. Imports no engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from kvstore.model.cost import PrefillCost
from kvstore_client.client import Client
from kvstore_client.config import ClientConfig
from kvstore_client.engines.async_tier import Deadlines
from kvstore_client.engines.refused import Refused

__all__ = ["Options"]

DEADLINES: Final = Deadlines()
ENGINE_ID_CHARACTERS_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class Options:
    """What it may say besides what the engine itself needs to load the adapter.

    target: the daemon's data socket; or "tcp://host:port" with the tls_* files and the token.
    model_name: as shown by the daemon; engines that share have one name. Default: the hub's id, or
        the name of the model's folder.
    weights_revision: what names the weights, vouched for by you. Default: the hub's commit, or a
        digest of the files, computed in the background.
    weight_epoch: of weights that are updated in place; see `kvstore epoch`.
    lookup_deadline_ms, load_deadline_ms, store_deadline_ms: from when the engine asked for it.
    durable: a block counts as stored when the daemon's disk has it; until then the engine keeps its
        memory.
    prefill_us_per_token, prefill_us_per_token2: cost of computing n tokens, a*n + b*n^2: what is
        slower to load is not loaded. Default: unknown, everything is loaded.
    """

    target: str
    model_name: str = ""
    weights_revision: str = ""
    weight_epoch: int = 0
    lookup_deadline_ms: int = DEADLINES.lookup_ms
    load_deadline_ms: int = DEADLINES.load_ms
    store_deadline_ms: int = DEADLINES.store_ms
    durable: bool = False
    prefill_us_per_token: float = 0.0
    prefill_us_per_token2: float = 0.0
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_server_name: str = ""
    token_file: str = ""

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """Raises Refused for an option that there is not, and for one that is missing."""
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise Refused(f"{', '.join(unknown)}: no such option; there are {', '.join(names)}")
        if not given.get("target"):
            raise Refused("target is missing: the path of the daemon's data socket")
        for field in dataclasses.fields(cls):
            if field.name in given:
                _check(field.name, given[field.name], str(field.type))
        return cls(**given)

    def client(self, engine_id: str) -> Client:
        """Raises BadRequest for an option that cannot be. Connects when it is first needed."""
        cost = None
        if self.prefill_us_per_token or self.prefill_us_per_token2:
            cost = PrefillCost(float(self.prefill_us_per_token), float(self.prefill_us_per_token2))
        config = ClientConfig(
            prefill=cost,
            tls_ca_file=self.tls_ca_file,
            tls_cert_file=self.tls_cert_file,
            tls_key_file=self.tls_key_file,
            tls_server_name=self.tls_server_name,
            token_file=self.token_file,
        )
        return Client(self.target, config=config, engine_id=engine_id[:ENGINE_ID_CHARACTERS_MAX])


def _check(name: str, value: object, kind: str) -> None:
    """Of JSON's types: true is no number, and "false" no flag."""
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "bool": (bool,),
        "float": (int, float),
    }
    if type(value) not in kinds[kind]:
        raise Refused(f"{name} is of type {kind}, not {type(value).__name__}")
