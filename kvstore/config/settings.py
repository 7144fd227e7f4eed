"""Every setting of the daemon, in one table of structs.

A setting has a name, type, default, bounds, what it is, and when one would change it.

The loader, the validation, `kvstored config --explain` and the documentation derive from this
table. The structs are frozen values; building one by hand checks nothing, `kvstore.config.load`
does. A size is a whole number of bytes here; an empty string or 0 means that the value follows from
others, as the setting's text says.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal, NamedTuple

import msgspec

from kvstore.config.device import DeviceSettings
from kvstore.config.evidence import AuditSettings, ServeSettings
from kvstore.config.guarding import GuardSettings
from kvstore.config.knob import knob, wrong
from kvstore.config.network import HttpSettings, TcpSettings

DEFAULT_TENANT = "default"

_MIB = 1 << 20
CAPACITY_BYTES_MIN = 64 << 10
"""Of the host tier. Less is a slip, such as 16 for 16GiB, and would be a store of nothing."""
SIZE_UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": _MIB, "KiB": 1 << 10, "B": 1}


_Mode = Annotated[
    str,
    knob(
        "Permissions of the socket file, octal. Connecting needs the write bit.",
        when="the peer runs as another user: 0660 and a common group.",
        pattern=r"^0?[0-7]{3}$",
    ),
]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The process itself."""

    runtime_dir: Annotated[
        str,
        knob(
            "Folder of the sockets and their locks; made with mode 0700 if absent. "
            "Empty: $XDG_RUNTIME_DIR/kvstore, else /run/kvstore for root, else /tmp/kvstore-UID.",
            when="the engine's container sees another folder.",
        ),
    ] = ""
    trust_folder_writers: Annotated[
        bool,
        knob(
            "Put sockets also where everybody may exchange them: into or below a folder that is "
            "open to all and not sticky (mode 0777). Whoever can may answer in the daemon's place.",
            when="the folder is a volume that only the daemon and its engines mount, such as a "
            "Kubernetes emptyDir.",
        ),
    ] = False
    drain_grace_s: Annotated[
        float,
        knob(
            "Seconds that calls in flight get to end after SIGTERM.",
            when="the supervisor kills sooner (keep it below terminationGracePeriodSeconds).",
            ge=0,
            le=600,
        ),
    ] = 10.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        knob("Least severe log record that is written.", when="looking for a fault."),
    ] = "info"
    log_format: Annotated[
        Literal["json", "text"],
        knob("Log records as one JSON object a line, or as text.", when="a person reads them."),
    ] = "json"


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True):
    """An isolation domain. Who connects to its socket is this tenant, whatever a request says."""

    socket: Annotated[
        str,
        knob(
            "The tenant's data socket, relative to server.runtime_dir. Empty: data.sock for the "
            "tenant `default`, NAME/data.sock for others, so that a container can mount its "
            "tenant's folder alone.",
            when="a client expects another path.",
        ),
    ] = ""
    mode: _Mode = "0600"
    group: Annotated[
        str,
        knob(
            "Group that owns the socket, by name or number. Empty: the daemon's.",
            when="the engine runs as another user.",
        ),
    ] = ""
    quota_bytes: Annotated[
        int,
        knob(
            "Bytes of each pool that this tenant keeps when others need room; it may use more "
            "while nobody does. 0: an equal share.",
            when="tenants should not share alike.",
            ge=0,
        ),
    ] = 0
    disk_quota_bytes: Annotated[
        int,
        knob(
            "Bytes of the disk tier that this tenant keeps when others need room; it may use more "
            "while nobody does. 0: an equal share of what others' quotas leave.",
            when="tenants should not share alike.",
            ge=0,
        ),
    ] = 0
    token_file: Annotated[
        str,
        knob(
            "File of the tokens that this tenant's clients show over TCP, one a line, as `kvstore "
            "token` makes them; several while they are exchanged. Readable by the daemon's user "
            "alone. Empty: not reachable over TCP.",
            when="tcp.listen is set.",
        ),
    ] = ""
    client_names: Annotated[
        str,
        knob(
            "Names in the certificates of this tenant's clients, separated by commas: of the "
            "subject alternative names, or the common name where a certificate has none of those. "
            "Taken literally.",
            when="tcp.listen is set.",
        ),
    ] = ""

    @property
    def mode_bits(self) -> int:
        """Permissions as a number."""
        return int(self.mode, 8)

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """`client_names` one by one."""
        return tuple(name.strip() for name in self.client_names.split(",") if name.strip())


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's socket."""

    socket: Annotated[
        str,
        knob(
            "The admin socket, relative to server.runtime_dir.",
            when="the tool expects another path.",
        ),
    ] = "admin.sock"
    mode: _Mode = "0600"

    @property
    def mode_bits(self) -> int:
        """Permissions as a number."""
        return int(self.mode, 8)


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The tier in CPU memory: the dial that matters."""

    capacity_bytes: Annotated[
        int,
        knob(
            "CPU memory for blocks, staging included. 0: a quarter of what the machine or its "
            "cgroup has.",
            when="first of all: more bytes, more hits.",
            ge=0,
        ),
    ] = 0
    allow_smaller: Annotated[
        bool,
        knob(
            "Start with less than host.capacity_bytes if that does not fit, and grow when it does.",
            when="restarts overlap with clients that still hold the old memory.",
        ),
    ] = False
    staging_bytes: Annotated[
        int,
        knob(
            "Memory in which one session prepares blocks; also the largest part of a block that a "
            "client may push. 0: 256 MiB, at most an eighth of the capacity.",
            when="pushes answer STAGING_BUSY, or one part is larger.",
            ge=0,
        ),
    ] = 0
    mlock: Annotated[
        Literal["auto", "off", "require"],
        knob(
            "Lock the memory against swapping: if possible, never, or refuse to start.",
            when="the machine swaps.",
        ),
    ] = "auto"
    huge_pages: Annotated[
        Literal["auto", "off"],
        knob(
            "Put the memory into pages of 2 MiB where Linux can (6.1), from which and into which "
            "disks are faster, or leave it in those that it came in.",
            when="making them, once after each start, disturbs what runs beside.",
        ),
    ] = "auto"


class DiskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The tier on an SSD, below CPU memory; what is in it outlives the daemon."""

    path: Annotated[
        str,
        knob(
            "Folder of the disk tier, for this daemon alone. Empty: no disk tier.",
            when="more is worth keeping than fits into memory, or restarts should begin warm.",
        ),
    ] = ""
    capacity_bytes: Annotated[
        int,
        knob(
            "Bytes that everything in disk.path may take. 0: four fifths of what its file system "
            "has free at the start.",
            when="the disk is shared, or has a size limit.",
            ge=0,
        ),
    ] = 0
    endurance_bytes_per_day: Annotated[
        int,
        knob(
            "Bytes that may be written in 24 hours; beyond it nothing is saved. 0: no limit.",
            when="the SSD's rated drive writes a day are few.",
            ge=0,
        ),
    ] = 0


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one client may ask for; beyond it the answer is a refusal, never a queue."""

    keys_per_call_max: Annotated[
        int,
        knob(
            "Block keys in one call; bounds the size of a message too.",
            when="prompts are longer than this many blocks.",
            ge=1,
            le=1 << 20,
        ),
    ] = 16384
    sessions_max: Annotated[
        int,
        knob("Clients attached at one time.", when="more ranks share a node.", ge=1, le=1 << 16),
    ] = 256
    view_bytes_per_session_max: Annotated[
        int,
        knob(
            "Bytes that one session may hold by views, which cannot be evicted. 0: a quarter of "
            "the capacity.",
            when="views answer VIEW_LIMIT.",
            ge=0,
        ),
    ] = 0
    lease_ttl_ms: Annotated[
        int,
        knob(
            "Longest and default life of a read lease and of a reservation.",
            when="a copy takes longer than this.",
            ge=10,
            le=3_600_000,
        ),
    ] = 30_000
    concurrent_calls_max: Annotated[
        int,
        knob(
            "Calls in work at one time, for each socket.",
            when="calls answer LIMIT_QUEUE.",
            ge=1,
            le=1 << 16,
        ),
    ] = 1024


class StateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What has to outlive the process."""

    path: Annotated[
        str,
        knob(
            "Folder of the durable ledger of weight epochs, reviews and spaces. Empty: in the disk "
            "tier's folder; without one they end with the process.",
            when="weights are updated online, or fingerprints are reviewed.",
        ),
    ] = ""


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One record a request."""

    ring_records: Annotated[
        int,
        knob(
            "Requests kept in memory for `kvstore trace`.",
            when="looking further back.",
            ge=0,
            le=1 << 20,
        ),
    ] = 4096
    file: Annotated[
        str,
        knob(
            "File that every record is appended to, one JSON object a line. Empty: none.",
            when="traffic is to be replayed or reported on.",
        ),
    ] = ""


class RecordSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The access log: what was asked for, without tokens or keys, for `kvstore simulate`."""

    path: Annotated[
        str,
        knob(
            "Folder of the access log: one line a prompt in the block traces' format, block ids "
            "and tenants hashed. Empty: none.",
            when="sizes or policies are to be tried on your own traffic.",
        ),
    ] = ""
    capacity_bytes: Annotated[
        int,
        knob(
            "Bytes of all its files. A file has an eighth; the oldest go. A block of a prompt "
            "takes about 17.",
            when="the log is to reach further back.",
            ge=_MIB,
            le=1 << 50,
        ),
    ] = 256 * _MIB


class ReviewSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Fingerprints that wait for an operator."""

    ttl_hours: Annotated[
        float,
        knob(
            "Hours until an undecided fingerprint is dropped with its blocks.",
            when="operators answer more slowly.",
            ge=0,
            le=24 * 366,
        ),
    ] = 24.0


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept."""

    eviction: Annotated[
        Literal["lru", "hit_density"],
        knob(
            "Whom to evict: lru, the least recently used; hit_density, what promises the fewest "
            "hits for its room, learnt from how blocks are used again, which also decides what "
            "is worth a write to disk.",
            when="a microsecond less for each block that is used matters more than hits; `kvstore "
            "simulate` tells what lru loses on a recorded trace.",
        ),
    ] = "hit_density"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. `origins` tells by dotted name where a value that is no default came from."""

    server: ServerSettings = ServerSettings()
    tenants: dict[str, TenantSettings] = msgspec.field(
        default_factory=lambda: {DEFAULT_TENANT: TenantSettings()}
    )
    admin: AdminSettings = AdminSettings()
    http: HttpSettings = HttpSettings()
    tcp: TcpSettings = TcpSettings()
    host: HostSettings = HostSettings()
    device: DeviceSettings = DeviceSettings()
    disk: DiskSettings = DiskSettings()
    policy: PolicySettings = PolicySettings()
    limits: LimitSettings = LimitSettings()
    state: StateSettings = StateSettings()
    trace: TraceSettings = TraceSettings()
    record: RecordSettings = RecordSettings()
    review: ReviewSettings = ReviewSettings()
    guards: GuardSettings = GuardSettings()
    serve: ServeSettings = ServeSettings()
    audit: AuditSettings = AuditSettings()
    origins: dict[str, str] = {}

    def data_socket(self, tenant: str) -> str:
        """Absolute path of a tenant's data socket."""
        name = self.tenants[tenant].socket
        if not name:
            name = "data.sock" if tenant == DEFAULT_TENANT else f"{tenant}/data.sock"
        return os.path.normpath(os.path.join(self.server.runtime_dir, name))

    @property
    def ledger_path(self) -> str:
        """Folder of the ledger; empty: none."""
        if self.state.path or not self.disk.path:
            return self.state.path
        return os.path.join(self.disk.path, "ledger")

    @property
    def admin_socket(self) -> str:
        """Absolute path of the admin socket."""
        return os.path.normpath(os.path.join(self.server.runtime_dir, self.admin.socket))

    def limits_for(self, capacity_bytes: int) -> Limits:
        """All limits as numbers, for a host tier of this capacity.

        Raises StartError if a setting contradicts it.
        """
        host = self.host
        if capacity_bytes < CAPACITY_BYTES_MIN:
            raise wrong(
                "host.capacity_bytes",
                f"{show_size(capacity_bytes)} hold no blocks: {show_size(CAPACITY_BYTES_MIN)} at "
                "least; a number without a unit counts bytes",
            )
        staging_bytes = host.staging_bytes or min(256 * _MIB, capacity_bytes // 8)
        if staging_bytes > capacity_bytes // 2:
            raise wrong(
                "host.staging_bytes",
                f"{show_size(staging_bytes)} is more than half of the host tier's "
                f"{show_size(capacity_bytes)}",
            )
        quota_bytes = sum(tenant.quota_bytes for tenant in self.tenants.values())
        if quota_bytes > capacity_bytes:
            worst = max(self.tenants, key=lambda name: self.tenants[name].quota_bytes)
            raise wrong(
                f"tenants.{worst}.quota_bytes",
                f"quotas of {show_size(quota_bytes)} together exceed the host tier's "
                f"{show_size(capacity_bytes)}",
            )
        self._check_disk_quotas()
        return Limits(
            keys_per_call_max=self.limits.keys_per_call_max,
            message_bytes_max=max(16 * _MIB, 4 * 32 * self.limits.keys_per_call_max),
            part_bytes_max=staging_bytes,
            leases_per_session_max=10_000,
            view_bytes_per_session_max=self.limits.view_bytes_per_session_max
            or capacity_bytes // 4,
            staging_bytes=staging_bytes,
            sessions_max=self.limits.sessions_max,
            lease_ttl_ms=self.limits.lease_ttl_ms,
            reserve_ttl_ms=self.limits.lease_ttl_ms,
            concurrent_calls_max=self.limits.concurrent_calls_max,
        )

    def _check_disk_quotas(self) -> None:
        """StartError if they cannot be kept."""
        quota_bytes = sum(tenant.disk_quota_bytes for tenant in self.tenants.values())
        if self.disk.capacity_bytes and quota_bytes > self.disk.capacity_bytes:
            worst = max(self.tenants, key=lambda name: self.tenants[name].disk_quota_bytes)
            raise wrong(
                f"tenants.{worst}.disk_quota_bytes",
                f"quotas of {show_size(quota_bytes)} together exceed the disk tier's "
                f"{show_size(self.disk.capacity_bytes)}",
            )


class Limits(NamedTuple):
    """Every limit that a client can meet. Those that are no setting follow from one."""

    keys_per_call_max: int
    message_bytes_max: (
        int  # four times the keys of a call, since a lookup may ask for several cache groups
    )
    part_bytes_max: int  # a part has to fit into staging
    leases_per_session_max: int
    view_bytes_per_session_max: int
    staging_bytes: int
    sessions_max: int
    lease_ttl_ms: int
    reserve_ttl_ms: int
    concurrent_calls_max: int


def show_size(size_bytes: int) -> str:
    """The shortest exact form of a number of bytes: "512MiB"."""
    for unit, unit_bytes in SIZE_UNITS.items():
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return f"{size_bytes}B"
