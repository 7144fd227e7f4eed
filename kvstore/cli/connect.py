"""The way to the daemon: where its sockets are, and how its errors are told. For all commands.

A command never waits longer than its time limit, and a daemon that is away is one line and exit
code 4. Paths follow the daemon's own rule, from the same code.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from kvstore.cli.arguments import Number, check_texts
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.model.sockets import FD_SUFFIX, bytes_too_long

if TYPE_CHECKING:
    import grpc

    from kvstore.wire.v1.admin_pb2_grpc import AdminStub

F = TypeVar("F", bound=Callable[..., Any])

MESSAGE_BYTES_MAX = 64 << 20


class NotSo(click.ClickException):
    """What was asked for is not so, or was refused."""

    exit_code = 1


class Unreachable(click.ClickException):
    """No daemon answers."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class Daemon:
    """Which daemon to talk to, and how to print what it says."""

    runtime_dir: str
    admin_socket: str
    timeout_s: float
    as_json: bool

    @contextlib.contextmanager
    def admin(self) -> Iterator[AdminStub]:
        """A stub of the admin service; every error inside becomes one of this module's."""
        import grpc

        from kvstore.wire.v1.admin_pb2_grpc import AdminStub

        check_socket(self.admin_socket, "--admin-socket")
        options = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.enable_http_proxy", 0),
        ]
        with grpc.insecure_channel(
            f"unix:{os.path.abspath(self.admin_socket)}", options=options
        ) as channel:
            try:
                yield AdminStub(channel)
            except grpc.RpcError as error:
                raise told(error, self.admin_socket) from error


def daemon_options(command: F) -> F:
    """Adds --runtime-dir, --admin-socket, --timeout and --json; the command gets a `Daemon`."""

    @click.option(
        "--runtime-dir",
        metavar="FOLDER",
        help="Folder of the daemon's sockets. "
        "Default: $XDG_RUNTIME_DIR/kvstore, /run/kvstore for root, else /tmp/kvstore-UID.",
    )
    @click.option(
        "--admin-socket", metavar="FILE", help="The admin socket. Default: admin.sock in there."
    )
    @click.option(
        "--timeout",
        "timeout_s",
        type=Number(min=0, min_open=True, max=86_400),
        default=10.0,
        show_default=True,
        help="Seconds to wait for the daemon.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @functools.wraps(command)
    def with_daemon(
        *args: Any,
        runtime_dir: str | None,
        admin_socket: str | None,
        timeout_s: float,
        as_json: bool,
        **kwargs: Any,
    ) -> Any:
        check_texts(kwargs)
        folder, admin, _ = socket_paths(runtime_dir, admin_socket)
        daemon = Daemon(folder, admin, timeout_s, as_json)
        return command(daemon, *args, **kwargs)

    return with_daemon  # type: ignore[return-value]


def socket_paths(
    runtime_dir: str | None, admin_socket: str | None = None, data_socket: str | None = None
) -> tuple[str, str, str]:
    """(folder, admin socket, data socket of the default tenant) by the daemon's rule; sockets that
    are given are taken as they are."""
    from kvstore.config import DEFAULT_TENANT, load

    flags = {}
    if runtime_dir is not None:
        flags["server.runtime_dir"] = os.path.abspath(runtime_dir)
    try:
        settings = load(None, None, flags)
    except KVStoreError as error:
        raise click.UsageError(str(error)) from error
    return (
        settings.server.runtime_dir,
        admin_socket or settings.admin_socket,
        data_socket or settings.data_socket(DEFAULT_TENANT),
    )


def check_socket(path: str, option: str) -> None:
    """Says at once what gRPC would say late or badly."""
    over = bytes_too_long(os.path.abspath(path), data=False)
    if over:
        raise Unreachable(f"no daemon at {path}: too long for a socket by {over} bytes")
    if path.endswith(FD_SUFFIX):
        raise Unreachable(f"no daemon at {path}: that socket hands out memory; see {option}")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise Unreachable(
            f"no daemon at {path}: there is no such socket; start kvstored, or say where it "
            f"is with --runtime-dir or {option}"
        ) from None
    except OSError as error:
        raise Unreachable(f"no daemon at {path}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise Unreachable(f"no daemon at {path}: that is no socket; see {option}")
    if not os.access(path, os.W_OK):
        raise Unreachable(
            f"no daemon at {path} for this user: no write permission on the socket; run as the "
            "daemon's user, or change `mode` and `group` of the socket in its settings"
        )


def told(error: grpc.RpcError, path: str) -> click.ClickException:
    """A failed call as one line."""
    import grpc

    from kvstore.wire import status
    from kvstore.wire.v1 import store_pb2

    call = cast("grpc.Call", error)  # what grpc raises is a call, too
    code = call.code()
    metadata = cast("tuple[tuple[str, bytes], ...]", call.trailing_metadata() or ())
    for key, value in metadata:
        if key == status.DETAIL_KEY:
            detail = store_pb2.ErrorDetail.FromString(value)
            reason = Reason.from_wire(detail.reason)
            setting = f" (setting: {detail.setting})" if detail.setting else ""
            return NotSo(f"{reason.name}: {detail.detail or reason.text}{setting}")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unreachable(f"no daemon answers at {path}; is kvstored running?")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unreachable(f"the daemon at {path} did not answer in time; see --timeout")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        if os.path.exists(f"{path}{FD_SUFFIX}"):
            return NotSo(f"{path} is a data socket; name the admin socket with --admin-socket")
        return NotSo(f"the daemon at {path} does not know this verb; compare the versions")
    return NotSo(f"{code.name}: {call.details()}")


def packed_keys(texts: tuple[str, ...]) -> bytes:
    """Packed keys from hexadecimal text, 64 digits each; "-" reads them from standard input."""
    words: list[str] = []
    for text in texts:
        if text == "-":
            words += sys.stdin.read().split()
        else:
            words.append(text)
    keys = []
    for word in words:
        try:
            key = bytes.fromhex(word)
        except ValueError:
            key = b""
        if len(key) != 32:
            raise click.UsageError(f"a key is 64 hexadecimal digits; {word[:8]}... is not one")
        keys.append(key)
    return b"".join(keys)
