"""Finds the values of settings and checks them: defaults, TOML file, environment, flags.

A value is checked alone, against its type and bounds in `settings`, so that an error can name its
setting and where it came from; then the whole is checked for what only shows together. Pure but for
reading the one TOML file.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from kvstore.config.knob import wrong
from kvstore.config.settings import DEFAULT_TENANT, SIZE_UNITS, Settings, TenantSettings
from kvstore.model.sampling import SALT_BYTES_MAX
from kvstore.model.sockets import FD_SUFFIX, LOCK_SUFFIX, bytes_too_long

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "KVSTORE_"
TENANTS_MAX = 64

_TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_SIZE = re.compile(r"(\d{1,19})(\.\d{1,9})?\s*(TiB|GiB|MiB|KiB|B)?")
_SIZE_BYTES_MAX = (1 << 62) - 1
_SUFFIXES = (FD_SUFFIX, LOCK_SUFFIX)


class Field(NamedTuple):
    """One setting of the table."""

    section: str
    name: str
    kind: type  # bool, int, float or str
    hint: Any  # with its bounds
    default: Any

    @property
    def is_size(self) -> bool:
        """Whether it counts bytes, so that it may be given as "4GiB"."""
        return self.kind is int and self.name.endswith(("_bytes", "_bytes_per_day"))


def _fields() -> dict[str, dict[str, Field]]:
    sections: dict[str, dict[str, Field]] = {}
    for section, struct in get_type_hints(Settings).items():
        if section == "origins":
            continue
        table = TenantSettings if section == "tenants" else struct
        defaults = table()
        sections[section] = {}
        for name, hint in get_type_hints(table, include_extras=True).items():
            base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            kind = str if get_origin(base) is Literal else base
            sections[section][name] = Field(section, name, kind, hint, getattr(defaults, name))
    return sections


FIELDS = _fields()


class _Given(NamedTuple):
    """A value as it was found."""

    name: str
    value: Any
    origin: str


def load(
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    *,
    uid: int | None = None,
) -> Settings:
    """The effective settings. `flags` maps dotted names to text, as `parse_flags` gives them.

    Raises StartError, which names the setting, if a name does not exist, a value is out of bounds
    or the whole contradicts itself.
    """
    environ = os.environ if environ is None else environ
    given: list[_Given] = []
    tenants: dict[str, dict[str, Any]] = {}
    if path is not None:
        document = _read_toml(path)
        given += _from_toml(document, f"file {path}")
        tables = document.get("tenants", {})
        tenants.update({_tenant_name(name): {} for name in tables})
    given += _from_environ(environ)
    given += [_Given(name, text, f"flag --{name}") for name, text in (flags or {}).items()]

    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for name, raw, origin in given:
        tenant, field = _resolve(name, origin)
        value = _checked(name, field, raw, origin)
        table = (
            values.setdefault(field.section, {})
            if tenant is None
            else tenants.setdefault(tenant, {})
        )
        table[field.name] = value
        origins[name] = origin

    server = values.setdefault("server", {})
    if not server.get("runtime_dir"):
        server["runtime_dir"] = _default_runtime_dir(environ, os.geteuid() if uid is None else uid)
    document = {**values, "tenants": tenants or {DEFAULT_TENANT: {}}, "origins": origins}
    settings = msgspec.convert(document, Settings)
    _check_whole(settings)
    return settings


def parse_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Dotted names and text of `--host.capacity_bytes=4GiB` or `--host.capacity_bytes 4GiB`.

    A flag of a yes-or-no setting may stand alone, for true.
    """
    flags: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or len(argument) == 2:
            raise wrong(argument, f"{argument!r} is neither a flag nor a command")
        name, equals, text = argument[2:].partition("=")
        if not equals:
            field = _resolve(name, f"flag --{name}")[1]
            if field.kind is bool and not (rest and rest[0] in ("true", "false")):
                text = "true"
            elif rest:
                text = rest.pop(0)
            else:
                raise wrong(name, f"flag --{name} needs a value")
        flags[name] = text
    return flags


def parse_size(text: str) -> int:
    """Bytes of "4GiB", "1.5 MiB", "4096". Raises ValueError if it is not a size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size like 512MiB or 4GiB")
    whole, fraction, unit = match.groups()
    unit_bytes = SIZE_UNITS[unit or "B"]
    digits = (fraction or ".")[1:]
    size_bytes, remainder = divmod(int(whole + digits) * unit_bytes, int(10 ** len(digits)))
    if remainder:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    if size_bytes > _SIZE_BYTES_MAX:
        raise ValueError(f"{text!r} is more than an address space")
    return size_bytes


def names(tenant: str = "NAME") -> list[str]:
    """Every dotted name, with `tenant` standing where a tenant's name goes."""
    return [
        f"tenants.{tenant}.{name}" if section == "tenants" else f"{section}.{name}"
        for section, fields in FIELDS.items()
        for name in fields
    ]


def env_name(name: str) -> str:
    """The environment variable of a dotted name."""
    return ENV_PREFIX + name.replace(".", "__").upper()


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise wrong("config", f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise wrong("config", f"{path} is not TOML: {error}") from None


def _from_toml(document: Mapping[str, Any], origin: str) -> Iterator[_Given]:
    for section, table in document.items():
        if section not in FIELDS:
            raise _unknown(section, FIELDS, origin)
        if not isinstance(table, dict):
            raise wrong(section, f"{origin}: [{section}] is a table")
        for name, value in table.items():
            if section != "tenants":
                yield _Given(f"{section}.{name}", value, origin)
            elif isinstance(value, dict):
                yield from (
                    _Given(f"tenants.{name}.{key}", one, origin) for key, one in value.items()
                )
            else:
                raise wrong(f"tenants.{name}", f"{origin}: [tenants.{name}] is a table")


def _from_environ(environ: Mapping[str, str]) -> Iterator[_Given]:
    # Names without a double underscore are not ours alone: an orchestrator injects KVSTORE_PORT and
    # its like for a service that is called kvstore. But one that would be a setting with more
    # underscores is surely a slip.
    slips = {env_name(name).replace("__", "_"): name for name in names()}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX):
            continue
        if "__" in variable:
            name = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            yield _Given(name, text, f"environment {variable}")
        elif variable in slips:
            name = slips[variable]
            raise wrong(name, f"{variable} is not read: the name is {env_name(name)}")


def _tenant_name(name: str) -> str:
    if not _TENANT_NAME.fullmatch(name):
        raise wrong(
            f"tenants.{name[:40]}",
            "a tenant's name is 1 to 32 of a-z, 0-9, - and _, starting with no sign",
        )
    return name


def _resolve(name: str, origin: str) -> tuple[str | None, Field]:
    parts = name.split(".")
    if parts[0] == "tenants" and len(parts) == 3:
        tenant = _tenant_name(parts[1])
        if parts[2] in FIELDS["tenants"]:
            return tenant, FIELDS["tenants"][parts[2]]
        raise _unknown(name, names(tenant), origin)
    if (
        len(parts) == 2
        and parts[0] in FIELDS
        and parts[0] != "tenants"
        and parts[1] in FIELDS[parts[0]]
    ):
        return None, FIELDS[parts[0]][parts[1]]
    raise _unknown(name, names(), origin)


def _unknown(name: str, known: Iterable[str], origin: str) -> Exception:
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return wrong(name, f"{origin}: there is no setting {name!r}; the nearest is {nearest[0]!r}")


def _checked(name: str, field: Field, raw: Any, origin: str) -> Any:
    from_file = origin.startswith("file ")
    try:
        value = raw
        if isinstance(raw, str) and field.is_size:
            value = parse_size(raw)
        elif not from_file:
            value = _from_text(field.kind, raw)
        value = msgspec.convert(value, field.hint)
        if isinstance(value, str) and any(ord(char) < 32 or ord(char) == 127 for char in value):
            raise ValueError("a control character is not allowed")
    except (ValueError, msgspec.ValidationError) as error:
        raise wrong(name, f"{origin}: {error}") from None
    return value


def _from_text(kind: type, text: str) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{text!r} is neither true nor false")
        return text == "true"
    if kind is int:
        if not re.fullmatch(r"[+-]?\d{1,19}", text):
            raise ValueError(f"{text!r} is not a whole number")
        return int(text)
    if kind is float:
        return float(text)
    return text


def _default_runtime_dir(environ: Mapping[str, str], uid: int) -> str:
    given = environ.get("XDG_RUNTIME_DIR", "")
    if given.startswith("/"):
        return os.path.join(given, "kvstore")
    return "/run/kvstore" if uid == 0 else f"/tmp/kvstore-{uid}"


def _check_whole(settings: Settings) -> None:
    if not os.path.isabs(settings.server.runtime_dir):
        raise wrong(
            "server.runtime_dir", f"{settings.server.runtime_dir!r} is not an absolute path"
        )
    if len(settings.tenants) > TENANTS_MAX:
        raise wrong("tenants", f"{len(settings.tenants)} tenants are more than {TENANTS_MAX}")
    sockets = {"admin.socket": settings.admin.socket}
    paths = {"admin.socket": settings.admin_socket}
    for tenant, one in settings.tenants.items():
        sockets[f"tenants.{tenant}.socket"] = one.socket
        paths[f"tenants.{tenant}.socket"] = settings.data_socket(tenant)
    owners: dict[str, str] = {}
    for name, path in paths.items():
        _check_socket(settings.server.runtime_dir, name, sockets[name], path)
        if path in owners:
            raise wrong(name, f"{path} is the socket of {owners[path]} already")
        owners[path] = name
    _ = settings.http.address  # raises if it is none
    _check_tcp(settings)
    if len(settings.serve.salt.encode()) > SALT_BYTES_MAX:
        raise wrong("serve.salt", f"longer than {SALT_BYTES_MAX} bytes")
    tokens = [(f"tenants.{name}.token_file", t.token_file) for name, t in settings.tenants.items()]
    for name, path in (
        ("disk.path", settings.disk.path),
        ("state.path", settings.state.path),
        ("trace.file", settings.trace.file),
        ("record.path", settings.record.path),
        ("tcp.cert_file", settings.tcp.cert_file),
        ("tcp.key_file", settings.tcp.key_file),
        ("tcp.client_ca_file", settings.tcp.client_ca_file),
        *tokens,
    ):
        if path and not os.path.isabs(path):
            raise wrong(name, f"{path!r} is not an absolute path")


def _check_tcp(settings: Settings) -> None:
    """TCP has certificates on both sides, and each tenant that it serves has its own names and
    tokens.
    """
    tcp = settings.tcp
    if tcp.address is None:
        return
    for name, value in (
        ("cert_file", tcp.cert_file),
        ("key_file", tcp.key_file),
        ("client_ca_file", tcp.client_ca_file),
    ):
        if not value:
            raise wrong(f"tcp.{name}", "tcp.listen is set: there is no TCP without TLS")
    owners: dict[str, str] = {}
    for tenant, one in settings.tenants.items():
        if one.token_file and not one.certificate_names:
            raise wrong(
                f"tenants.{tenant}.client_names",
                "there is a token_file: name the certificates that may come with its tokens",
            )
        if one.certificate_names and not one.token_file:
            raise wrong(
                f"tenants.{tenant}.token_file",
                "there are client_names: a certificate alone does not let anybody in",
            )
        for certificate in one.certificate_names:
            if owners.setdefault(certificate, tenant) != tenant:
                raise wrong(
                    f"tenants.{tenant}.client_names",
                    f"{certificate!r} is of the tenant {owners[certificate]!r} already: a "
                    "certificate belongs to one tenant",
                )
    if not owners:
        raise wrong(
            "tcp.listen", "no tenant has a token_file and client_names: nobody could come in"
        )


def _check_socket(runtime_dir: str, name: str, given: str, path: str) -> None:
    if os.path.isabs(given):
        raise wrong(name, f"{given!r} is absolute; a socket lies in server.runtime_dir")
    if not path.startswith(os.path.join(os.path.normpath(runtime_dir), "")):
        raise wrong(name, f"{given!r} leaves server.runtime_dir")
    if path.endswith(_SUFFIXES):
        raise wrong(
            name,
            f"{given!r} ends like the files that stand beside a socket: {', '.join(_SUFFIXES)}",
        )
    if over := bytes_too_long(path, data=True):
        raise wrong(
            "server.runtime_dir",
            f"{path} is too long for a socket by {over} bytes; choose a shorter folder",
        )
