"""Settings of a client: one frozen value, each field with its default and when to change it.

The defaults suit an engine beside its daemon. There is no loader: an engine has a configuration of
its own and passes these on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvstore.model.cost import PrefillCost, check_cost
from kvstore.model.reasons import BadRequest, Reason
from kvstore.model.seeds import seed_named

__all__ = ["ClientConfig", "TransportKind"]

TransportKind = Literal["auto", "shm", "stream"]

DEADLINE_MS_MAX = 3_600_000
TLS_FILES = ("tls_ca_file", "tls_cert_file", "tls_key_file", "token_file")
"""All needed over TCP."""


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """See the fields.

    deadline_ms: budget of one call with all its steps; what is not done by then is a miss or a
        skipped push. Change it: to less than what a miss may cost an engine's first token; to more
        for pushes of gigabytes, which take 0.3-0.5 s a GiB.
    transport: "auto" maps the daemon's memory. Where it cannot, the daemon sends what is fetched
        over the fd socket: two copies in the kernel instead of one by the client. What is pushed
        then goes through gRPC, several times slower; so does what is fetched where there is no fd
        socket (a container without it). Change it: "shm" to be refused rather than served so,
        "stream" to share no memory with the daemon.
    connect_timeout_ms: one attempt to reach the daemon. Change it: to more on a machine so loaded
        that a healthy daemon answers later than this.
    breaker_failures: calls in a row that fail for want of an answer before no more are made. Change
        it: to 1 where each missed deadline hurts, to more where hiccups are usual.
    breaker_retry_ms: longest pause between attempts to find a daemon that was away. Change it: to
        more where hundreds of clients share one machine.
    populate: fault the daemon's memory in ahead, in the background (0.1 s of one core a GiB at
        connect; without, the first fetch of each page takes 1.5 times as long). Change it: to False
        for short-lived processes.
    copy_threads: 2 halves batches of 8 MiB and more: 1.7 times as fast where a core is free, no
        slower where none is. Change it: to 1 if the engine needs every core meanwhile.
    async_threads: most operations of one AsyncClient at once; those beyond wait in line. Change it:
        to more if that many requests wait for blocks of another engine at the same time.
    prefill: the model's prefill cost, so that lookups say whether loading is worth it; or the name
        of a measured one, as "Llama-3.1-8B 1xH100" (`kvstore plan --list`). A lookup may bring its
        own. It is a beginning: `observe_prefill` calibrates it. None: no gate until then.
    tls_ca_file: of a tcp:// target: authorities that sign the daemon's certificate, PEM. Change it:
        and the next three, for every target over TCP, which has no other way in.
    tls_cert_file: this client's certificate. Change it: see tls_ca_file; all files are read again
        when they change.
    tls_key_file: its private key, without a passphrase. Change it: see tls_ca_file.
    token_file: this tenant's token, alone or as the last line. Change it: see tls_ca_file.
    tls_server_name: the name in the daemon's certificate. "": the target's host. Change it: where
        the daemon is reached by another name than its certificate has.
    """

    deadline_ms: int = 2_000
    transport: TransportKind = "auto"
    connect_timeout_ms: int = 1_000
    breaker_failures: int = 3
    breaker_retry_ms: int = 500
    populate: bool = True
    copy_threads: int = 2
    async_threads: int = 32
    prefill: PrefillCost | str | None = None
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    token_file: str = ""
    tls_server_name: str = ""

    def __post_init__(self) -> None:
        if self.transport not in get_args(TransportKind):
            kinds = ", ".join(get_args(TransportKind))
            raise BadRequest(Reason.BAD_REQUEST, f"transport is one of {kinds}", "transport")
        check_deadline_ms(self.deadline_ms)
        _number("connect_timeout_ms", self.connect_timeout_ms, 1, DEADLINE_MS_MAX)
        _number("breaker_failures", self.breaker_failures, 1, 1_000_000)
        _number("breaker_retry_ms", self.breaker_retry_ms, 10, DEADLINE_MS_MAX)
        _number("copy_threads", self.copy_threads, 1, 2)
        _number("async_threads", self.async_threads, 1, 1_024)
        for name in (*TLS_FILES, "tls_server_name"):
            value = getattr(self, name)
            if not isinstance(value, str) or "\0" in value:
                raise BadRequest(Reason.BAD_NAME, f"{name} must be a str", name)
        if type(self.populate) is not bool:
            raise BadRequest(Reason.BAD_REQUEST, "populate must be a bool", "populate")
        check_cost(self.prefill_cost)

    @property
    def prefill_cost(self) -> PrefillCost | None:
        """`prefill` as a cost. BadRequest: there is none of that name."""
        given = self.prefill
        return seed_named(given).cost if isinstance(given, str) else given


def check_deadline_ms(value: object) -> int:
    """`value` if it is a deadline; BadRequest(BAD_SIZE) otherwise."""
    return _number("deadline_ms", value, 1, DEADLINE_MS_MAX)


def _number(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(Reason.BAD_SIZE, f"{name} must be an int from {low} to {high}", name)
    return value
