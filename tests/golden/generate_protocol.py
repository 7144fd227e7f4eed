"""The wire contract as one descriptor, and what would break a peer of an earlier version.

    python tests/golden/generate_protocol.py            what changed, what of it breaks
    python tests/golden/generate_protocol.py --write    accepts additions as the contract of now

A change that breaks the wire is not written: it belongs into a `v2` (see protos/README.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from google.protobuf.descriptor_pb2 import (  # noqa: E402
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

from kvstore.wire.v1 import admin_pb2, fd_pb2, store_pb2  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "protocol.binpb"

Kind = FieldDescriptorProto.Type
Label = FieldDescriptorProto.Label


def current() -> FileDescriptorSet:
    """The contract as the generated code has it: store, fd, admin."""
    found = FileDescriptorSet()
    for module in (store_pb2, fd_pb2, admin_pb2):
        module.DESCRIPTOR.CopyToProto(found.file.add())
    return found


def golden() -> FileDescriptorSet:
    """The contract as it was accepted last."""
    return FileDescriptorSet.FromString(GOLDEN.read_bytes())


def encoded(contract: FileDescriptorSet) -> bytes:
    return contract.SerializeToString(deterministic=True)


# ---------------------------------------------------------------- what breaks


def breaks(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """A line for each change that a peer of the old contract would not understand, by full name."""
    lines: list[str] = []
    messages, newer = dict(_messages(old)), dict(_messages(new))
    for name, message in messages.items():
        lines += _of_message(name, message, newer.get(name))
    enums, newer_enums = dict(_enums(old)), dict(_enums(new))
    for name, enum in enums.items():
        lines += _of_enum(name, enum, newer_enums.get(name))
    methods, newer_methods = dict(_methods(old)), dict(_methods(new))
    for name, method in methods.items():
        lines += _of_method(name, method, newer_methods.get(name))
    return lines


def _of_message(name: str, old: DescriptorProto, new: DescriptorProto | None) -> Iterator[str]:
    if new is None:
        yield f"{name}: removed"
        return
    fields = {field.number: field for field in new.field}
    for field in old.field:
        now = fields.get(field.number)
        where = f"{name}.{field.name}"
        if now is None:
            kept = any(r.start <= field.number < r.end for r in new.reserved_range)
            if not (kept and field.name in new.reserved_name):
                yield f"{where}: removed without reserving its number and name"
            continue
        if now.name != field.name:
            yield f"{where}: number {field.number} is now {now.name}"
        elif _shape(old, field) != _shape(new, now):
            yield f"{where}: was {_shape(old, field)}, is {_shape(new, now)}"
    for reserved in old.reserved_range:
        for number in range(reserved.start, reserved.end):
            if number in fields:
                yield f"{name}.{fields[number].name}: number {number} was reserved"


def _shape(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """All of a field that its encoding and its meaning depend on."""
    words = [Label.Name(field.label), Kind.Name(field.type), field.type_name]
    if field.proto3_optional:
        words.append("optional")
    elif field.HasField("oneof_index"):
        words.append("oneof " + message.oneof_decl[field.oneof_index].name)
    return " ".join(word for word in words if word)


def _of_enum(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto | None) -> Iterator[str]:
    if new is None:
        yield f"{name}: removed"
        return
    numbers = {value.name: value.number for value in new.value}
    for value in old.value:
        if value.name not in numbers:
            yield f"{name}.{value.name}: removed"
        elif numbers[value.name] != value.number:
            yield f"{name}.{value.name}: was {value.number}, is {numbers[value.name]}"


def _of_method(
    name: str, old: MethodDescriptorProto, new: MethodDescriptorProto | None
) -> Iterator[str]:
    if new is None:
        yield f"{name}: removed"
        return
    for what in ("input_type", "output_type", "client_streaming", "server_streaming"):
        was, now = getattr(old, what), getattr(new, what)
        if was != now:
            yield f"{name}: {what} was {was}, is {now}"


# ---------------------------------------------------------------- everything by full name


def _messages(contract: FileDescriptorSet) -> Iterator[tuple[str, DescriptorProto]]:
    for file in contract.file:
        for message in file.message_type:
            yield from _nested(f"{file.package}.{message.name}", message)


def _nested(name: str, message: DescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    yield name, message
    for inner in message.nested_type:
        yield from _nested(f"{name}.{inner.name}", inner)


def _enums(contract: FileDescriptorSet) -> Iterator[tuple[str, EnumDescriptorProto]]:
    for file in contract.file:
        for enum in file.enum_type:
            yield f"{file.package}.{enum.name}", enum
    for name, message in _messages(contract):
        for enum in message.enum_type:
            yield f"{name}.{enum.name}", enum


def _methods(contract: FileDescriptorSet) -> Iterator[tuple[str, MethodDescriptorProto]]:
    for file in contract.file:
        for service in file.service:
            for method in service.method:
                yield f"{file.package}.{service.name}/{method.name}", method


def names(file: FileDescriptorProto) -> list[str]:
    """Everything in a file by full name, for who wants to see what was added."""
    one = FileDescriptorSet(file=[file])
    found = [f"{name}.{field.name}" for name, m in _messages(one) for field in m.field]
    found += [f"{name}.{value.name}" for name, enum in _enums(one) for value in enum.value]
    return found + [name for name, _ in _methods(one)]


def main(arguments: list[str]) -> int:
    new = current()
    old = golden() if GOLDEN.exists() else FileDescriptorSet()
    broken = breaks(old, new)
    for line in broken:
        print(f"breaks: {line}")
    known = {name for file in old.file for name in names(file)}
    for file in new.file:
        for name in names(file):
            if name not in known:
                print(f"adds: {name}")
    if "--write" in arguments and not broken:
        GOLDEN.write_bytes(encoded(new))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
