"""The disk tier's folder, format 1: what lies where in it, and the file that says so.

    <path>/FORMAT            "kvstore-disk 1\\n" and the folder's UUID
    <path>/lock              locked with flock by the daemon that has the folder
    <path>/index/            LMDB: a row a block, a row a segment; index.new while it is made
    <path>/segments/<id>.seg equal slots of record_bytes(block bytes): header page, then payload
    <path>/aside/            what could not be opened

Pure. The disk tier and its verifier import it.
"""

from __future__ import annotations

import re
import uuid

from kvstore.tiers.disk.format import VERSION, Fault, Finding

FORMAT_FILE = "FORMAT"
LOCK_FILE = "lock"
INDEX_FOLDER = "index"
INDEX_SCRATCH = "index.new"
SEGMENTS_FOLDER = "segments"
ASIDE_FOLDER = "aside"

_FORMAT_TEXT = re.compile(rb"kvstore-disk ([1-9][0-9]{0,8})\n(?s:(.*))")
_SEGMENT_NAME = re.compile(r"([0-9a-f]{8})\.seg")


def format_text(folder_id: uuid.UUID) -> bytes:
    """What the file FORMAT holds."""
    return f"kvstore-disk {VERSION}\n{folder_id}\n".encode("ascii")


def read_format_text(text: bytes) -> uuid.UUID | Fault:
    """The folder's id, or why it is no folder of this format. What follows the first line of a
    future version is not looked at.
    """
    match = _FORMAT_TEXT.fullmatch(text)
    if match is None:
        return Fault(
            Finding.FOREIGN if text else Finding.EMPTY, detail=f"{FORMAT_FILE} is not ours"
        )
    version = int(match[1])
    if version != VERSION:
        detail = f"format {version}, this build reads {VERSION}"
        return Fault(Finding.FUTURE_VERSION, detail=detail)
    try:
        folder_id = uuid.UUID(match[2].decode("ascii").strip())
    except ValueError:
        return Fault(Finding.HEADER_DAMAGED, detail=f"{FORMAT_FILE} names no folder id")
    if format_text(folder_id) != text:
        return Fault(Finding.HEADER_DAMAGED, detail=f"{FORMAT_FILE} holds more than it should")
    return folder_id


def segment_name(segment_id: int) -> str:
    """The file's name: eight hex digits, so that names sort as ids do."""
    if not 0 <= segment_id < 1 << 32:
        raise ValueError(f"segment id {segment_id} is not a u32")
    return f"{segment_id:08x}.seg"


def segment_of(name: str) -> int | None:
    """The id of the segment whose file has this name; None if it is no segment's."""
    match = _SEGMENT_NAME.fullmatch(name)
    return None if match is None else int(match[1], 16)
