"""Settings of the daemon: what they are (`settings`), where from (`load`), how shown (`show`).

Values are taken from, later ones winning: the defaults, one TOML file, the environment
(`KVSTORE_HOST__CAPACITY_BYTES=4GiB`), flags (`--host.capacity_bytes=4GiB`). A name that does not
exist is an error that names the nearest one. Every error is a `StartError` with the setting's
dotted name.

Nothing here touches a file other than the one TOML file: whether folders and sockets are safe to
use is checked where they are used. Callers: the daemon and the operator's tool.
"""

from kvstore.config.load import load, parse_flags, parse_size
from kvstore.config.network import HTTP_LISTEN, HttpSettings, TcpSettings
from kvstore.config.settings import (
    DEFAULT_TENANT,
    AdminSettings,
    HostSettings,
    Limits,
    LimitSettings,
    RecordSettings,
    ReviewSettings,
    ServerSettings,
    Settings,
    StateSettings,
    TenantSettings,
    TraceSettings,
    show_size,
)
from kvstore.config.show import explain, knobs, render_toml

__all__ = [
    "DEFAULT_TENANT",
    "HTTP_LISTEN",
    "AdminSettings",
    "HostSettings",
    "HttpSettings",
    "LimitSettings",
    "Limits",
    "RecordSettings",
    "ReviewSettings",
    "ServerSettings",
    "Settings",
    "StateSettings",
    "TcpSettings",
    "TenantSettings",
    "TraceSettings",
    "explain",
    "knobs",
    "load",
    "parse_flags",
    "parse_size",
    "render_toml",
    "show_size",
]
