"""Exact JSON of plain values and records: what a checkpoint holds comes back as it was, types included.

What JSON has is written as it is. Anything else is an object with one key, ``$`` and the kind's name: ``(1, 2)``
becomes ``{"$tuple": [1, 2]}``. Not-a-number and infinity are written as Python's ``json`` does.
"""

import base64
import dataclasses
import datetime
import decimal
import math
import uuid
import zlib
import zoneinfo
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

_JSON = (type(None), bool, int, float, str)
_SIGN = "$"
_ARRAY = "$array"


class _Kind(NamedTuple):
    """How values of one type are written, as values that ``to_json`` writes in turn, and read."""

    name: str
    type: type
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def to_json(value: Any, records: Sequence[type] = (), packed: bool = True) -> Any:
    """The value as JSON values.

    Lists, tuples, dictionaries, sets, text, numbers (NumPy's and decimal ones too), bytes, dates and times with their
    zones, UUIDs, NumPy arrays and records, nested as you like.

    >>> to_json({"when": datetime.date(2025, 7, 1)})
    {'when': {'$date': '2025-07-01'}}

    Args:
      value: what is to be written.
      records: dataclasses whose values it may hold. They are known by their names alone, and a field that was not there
        yet when a value was written gets its default.
      packed: whether arrays become JSON as all else does. If not, those of numbers stay, for ``apart``.

    Raises:
      TypeError: it holds something else; the message names its type.
    """
    kind = type(value)
    if kind in _JSON:
        return value
    if kind is list:
        return [to_json(item, records, packed) for item in value]
    if kind is dict and _is_json_object(value):
        return {key: to_json(item, records, packed) for key, item in value.items()}
    if kind in records:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {_SIGN + kind.__name__: to_json(fields, records, packed)}
    if kind is np.ndarray and not packed and value.dtype.kind in "biuf":
        return value
    if kind.__module__.partition(".")[0] == "pandas" and kind.__name__ == "Timestamp":
        return {f"{_SIGN}timestamp": _write_timestamp(value)}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.hasobject:
        raise TypeError(f"{kind.__name__} of {value.dtype}")
    for known in _KINDS:
        if kind is known.type or (known.type is np.generic and isinstance(value, np.generic)):
            return {_SIGN + known.name: to_json(known.write(value), records, packed)}
    raise TypeError(kind.__name__)


def from_json(data: Any, records: Sequence[type] = ()) -> Any:
    """The inverse of ``to_json``.

    Raises:
      ValueError: of a kind that this version does not know.
    """
    if isinstance(data, list):
        return [from_json(item, records) for item in data]
    if not isinstance(data, dict):
        return data
    if _is_json_object(data):
        return {key: from_json(item, records) for key, item in data.items()}
    [(name, content)] = data.items()
    content = from_json(content, records)
    for record in records:
        if name == _SIGN + record.__name__:
            return record(**content)
    if name == f"{_SIGN}timestamp":
        return _read_timestamp(content)
    for known in _KINDS:
        if name == _SIGN + known.name:
            return known.read(content)
    raise ValueError(f"{name} is no kind of value that this version knows")


def apart(value: Any) -> tuple[Any, bytes]:
    """What ``to_json`` leaves with its arrays in it, as JSON values that say where each of them is, and the arrays."""
    arrays: list[bytes] = []
    size = 0

    def walk(item: Any) -> Any:
        nonlocal size
        if isinstance(item, np.ndarray):
            about = {"dtype": str(item.dtype), "shape": list(item.shape), "at": size}
            arrays.append(np.ascontiguousarray(item).tobytes())
            size += item.nbytes
            return {_ARRAY: about}
        if isinstance(item, dict):
            return {key: walk(inner) for key, inner in item.items()}
        return [walk(inner) for inner in item] if isinstance(item, list) else item

    return walk(value), b"".join(arrays)


def together(value: Any, arrays: bytes) -> Any:
    """The inverse of ``apart``; what was packed stays so."""
    if isinstance(value, list):
        return [together(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    about = value.get(_ARRAY)
    if len(value) != 1 or not isinstance(about, dict) or "at" not in about:
        return {key: together(item, arrays) for key, item in value.items()}
    count = math.prod(about["shape"])
    return np.frombuffer(arrays, about["dtype"], count, about["at"]).reshape(about["shape"]).copy()


def pack(array: np.ndarray) -> dict[str, Any]:
    """Any array of numbers or text as JSON values, bit for bit, compressed."""
    data = base64.b85encode(zlib.compress(np.ascontiguousarray(array).tobytes())).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """The inverse of ``pack``."""
    data = zlib.decompress(base64.b85decode(packed["data"]))
    return np.frombuffer(data, packed["dtype"]).reshape(packed["shape"]).copy()


def _is_json_object(value: dict[Any, Any]) -> bool:
    """Whether a dictionary can be written as it is: its keys are text, and it does not look like one of ours."""
    return all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)).startswith(_SIGN))


def _write_dict(value: dict[Any, Any]) -> list[Any]:
    return [list(pair) for pair in value.items()]


def _write_set(value: set[Any]) -> list[Any]:
    """Equal sets are written alike, whatever order they are walked in."""
    return sorted(value, key=lambda item: repr(to_json(item)))


def _write_clock(value: datetime.datetime | datetime.time) -> list[Any]:
    """Its text, the name of its zone if it has one, and which of two equal readings of the clock it is."""
    zone = value.tzinfo
    if isinstance(zone, zoneinfo.ZoneInfo) and zone.key:
        return [value.replace(tzinfo=None).isoformat(), zone.key, value.fold]
    return [value.isoformat(), None, value.fold]


def _read_clock(kind: Any, data: list[Any]) -> Any:
    text, zone, fold = data
    value = kind.fromisoformat(text).replace(fold=fold)
    return value if zone is None else value.replace(tzinfo=zoneinfo.ZoneInfo(zone))


def _write_timestamp(value: Any) -> list[Any]:
    """What Parquet readers make of times in nanoseconds: one of pandas, which is not imported unless one is met."""
    return [value.value, None if value.tz is None else str(value.tz)]


def _read_timestamp(data: list[Any]) -> Any:
    import pandas

    nanoseconds, zone = data
    return pandas.Timestamp(nanoseconds, tz=zone)


def _write_timedelta(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _write_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _write_scalar(value: np.generic) -> dict[str, Any]:
    return pack(np.asarray(value))


def _read_scalar(packed: dict[str, Any]) -> Any:
    return unpack(packed)[()]


_KINDS = (
    _Kind("tuple", tuple, list, tuple),
    _Kind("dict", dict, _write_dict, dict),
    _Kind("set", set, _write_set, set),
    _Kind("bytes", bytes, _write_bytes, base64.b64decode),
    _Kind("decimal", decimal.Decimal, str, decimal.Decimal),
    _Kind("date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    _Kind("time", datetime.time, _write_clock, lambda data: _read_clock(datetime.time, data)),
    _Kind("datetime", datetime.datetime, _write_clock, lambda data: _read_clock(datetime.datetime, data)),
    _Kind("timedelta", datetime.timedelta, _write_timedelta, lambda data: datetime.timedelta(*data)),
    _Kind("uuid", uuid.UUID, str, uuid.UUID),
    _Kind("array", np.ndarray, pack, unpack),
    _Kind("scalar", np.generic, _write_scalar, _read_scalar),
)
