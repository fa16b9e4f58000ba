"""TensorBoard's event files, read without TensorBoard: a length, checksums and a message each.

Only scalars of known names are taken. The message is protocol-buffer bytes:

    Event{wall_time=1, step=2, summary=5}  Summary{value=1}  Value{tag=1, simple_value=2, tensor=8}
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO

from .assembly import MOST_STEPS
from .formats import FileFormat
from .names import field_of
from .row import Row

TENSORBOARD = FileFormat(
    "tensorboard",
    "TensorBoard's event files by torch, TensorFlow, Lightning, transformers, DeepSpeed, Megatron",
    ("step", "loss, norm, lr, scale, skips: tags of known names"),
    ("tags whose names are the user's own", "skips, if there is no such tag"),
)
_LONGEST = 2**24  # bytes of a record; a longer one (an image) is passed over
_FORMS = {1: "<f", 2: "<d"}  # TensorFlow's numbers of types


def is_event_file(name: str) -> bool:
    """By its name: events.out.tfevents.1699999999.host

    >>> is_event_file("events.out.tfevents.17.host.1.0"), is_event_file("run.log")
    (True, False)
    """
    return "events.out.tfevents" in name


def rows(file: IO[bytes]) -> Iterator[Row]:
    """The steps of a file in their order. The scalars of one step are one row; of several values
    of one scalar the last counts, which a resumed run wrote."""
    steps: dict[int, dict[str, float]] = {}
    for step, tag, value in _scalars(file):
        field = field_of(tag)
        if field in ("loss", "norm", "lr", "next_scale", "skips_in_all"):
            steps.setdefault(step, {})[field] = value
            if len(steps) >= MOST_STEPS:
                yield from _in_order(steps)
                steps = {}
    yield from _in_order(steps)


def _in_order(steps: dict[int, dict[str, float]]) -> Iterator[Row]:
    return (_row(step, steps[step]) for step in sorted(steps))


def _row(step: int, fields: dict[str, float]) -> Row:
    in_all = fields.pop("skips_in_all", None)
    counted = int(in_all) if in_all is not None and 0 <= in_all < 2**63 else None
    return Row("tensorboard", step=step, skips_in_all=counted, **fields)  # type: ignore[arg-type]


def _scalars(file: IO[bytes]) -> Iterator[tuple[int, str, float]]:
    """A file that is cut off or damaged ends there."""
    while len(head := file.read(12)) == 12:
        (length,) = struct.unpack("<Q", head[:8])
        if length > _LONGEST:
            if length > 2**40:
                return
            file.seek(length + 4, 1)
            continue
        record = file.read(length + 4)
        if len(record) < length + 4:
            return
        try:
            yield from _event(record[:-4])
        except (ValueError, IndexError, struct.error):
            return


def _event(record: bytes) -> Iterator[tuple[int, str, float]]:
    step, summary = 0, b""
    for number, value in _fields(record):
        if number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            summary = value
    if step >= 2**63:  # negative
        return
    for number, value in _fields(summary):
        if number == 1 and isinstance(value, bytes):
            tag, scalar = _value(value)
            if scalar is not None:
                yield step, tag, scalar


def _value(message: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, value in _fields(message):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            tag = value.decode("utf-8", "replace")
        elif number == 2 and len(value) == 4:
            (scalar,) = struct.unpack("<f", value)
        elif number == 8:
            scalar = _tensor(value)
    return tag, scalar


def _tensor(message: bytes) -> float | None:
    """A scalar tensor: its type, then its bytes or a list of one number."""
    dtype, content, listed = 0, b"", b""
    for number, value in _fields(message):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number == 4 and isinstance(value, bytes):
            content = value
        elif number in (5, 6) and isinstance(value, bytes):
            listed = value
    form = _FORMS.get(dtype)
    data = content or listed
    if form is None or len(data) != struct.calcsize(form):
        return None
    return float(struct.unpack(form, data)[0])


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields; ValueError for what is no message."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
        if size < 0 or at + size > len(message):
            raise ValueError("no message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("no number")
