"""Exact JSON of plain values and records: reading a checkpoint restores every value with its type. ``jsonable`` is the
other way to JSON: for rows that are only looked at. Digests of JSON, texts and arrays are here too. Values that JSON
has are written unchanged. Any other is an object with one key, ``$`` and the kind's name: ``(1, 2)`` becomes
``{"$tuple": [1, 2]}``. Not-a-number and infinity are written as Python's ``json`` does.
"""

import base64
import dataclasses
import datetime
import decimal
import hashlib
import importlib
import json
import math
import uuid
import zlib
import zoneinfo
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

_JSON = (type(None), bool, int, float, str)
_SIGN = "$"
_ARRAY = "$array"


def to_json(value: Any, records: Sequence[type] = (), arrays: bytearray | None = None) -> Any:
    """Convert a value to JSON values: lists, tuples, dictionaries, sets, text, numbers (NumPy's and decimal ones too),
    bytes, dates and times with their zones, UUIDs, NumPy arrays and records, nested as you like. ``records``:
    dataclasses that it may hold, identified by their names alone. ``arrays``: gets the bytes of arrays of numbers, and
    the JSON refers to them (see ``together``); None to convert them too. TypeError: a value of another type, which the
    message names.

    >>> to_json({"when": datetime.date(2025, 7, 1)})
    {'when': {'$date': '2025-07-01'}}
    """
    kind = type(value)
    if kind in _JSON:
        return value
    if kind is list:
        return [to_json(item, records, arrays) for item in value]
    if kind is dict and _is_json_object(value):
        return {key: to_json(item, records, arrays) for key, item in value.items()}
    if kind in records:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {_SIGN + kind.__name__: to_json(fields, records, arrays)}
    if kind is np.ndarray and arrays is not None and value.dtype.kind in "biuf":
        about = {"dtype": str(value.dtype), "shape": list(value.shape), "at": len(arrays)}
        arrays.extend(value.tobytes())
        return {_ARRAY: about}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.hasobject:
        raise TypeError(f"{kind.__name__} of {value.dtype}")
    if kind.__module__.partition(".")[0] == "pandas" and kind.__name__ == "Timestamp":
        name = "timestamp"  # which Parquet readers return for times in nanoseconds; pandas is not imported
    else:
        kind_sought = np.generic if issubclass(kind, np.generic) else kind
        name = next((name for name, (kind_known, _, _) in _KINDS.items() if kind_known is kind_sought), None)
    if name is None:
        raise TypeError(kind.__name__)
    _, write, _ = _KINDS[name]
    return {_SIGN + name: to_json(write(value), records, arrays)}


def from_json(data: Any, records: Sequence[Any] = ()) -> Any:
    """Convert JSON values back; the inverse of ``to_json``. ValueError: a value has a kind that this version does not
    know, or its content is none of this kind.
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
            return _made(name, lambda fields, kind=record: kind(**fields), content)
    if name.removeprefix(_SIGN) not in _KINDS:
        raise ValueError(f"{name} is not a kind of value known to this version")
    _, _, read = _KINDS[name.removeprefix(_SIGN)]
    return _made(name, read, content)


def _made(name: str, read: Callable[[Any], Any], content: Any) -> Any:
    try:
        return read(content)
    except Exception as error:
        raise ValueError(f"{name} has content that is none of its kind ({type(error).__name__}: {error})") from error


def together(value: Any, arrays: bytes) -> Any:
    """Put the arrays that ``to_json`` took out back in their places; arrays that it converted stay as they are."""
    if isinstance(value, list):
        return [together(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    about = value.get(_ARRAY)
    if len(value) != 1 or not isinstance(about, dict) or "at" not in about:
        return {key: together(item, arrays) for key, item in value.items()}
    count = math.prod(about["shape"])
    return np.frombuffer(arrays, about["dtype"], count, about["at"]).reshape(about["shape"]).copy()


def jsonable(value: Any) -> Any:
    """Convert ``value`` for JSON: NumPy and JAX scalars and arrays become Python's, NaN and infinity become None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(entry) for entry in value]
    return value


def digest(content: Any, digits: int = 16) -> str:
    """Return the first hexadecimal digits of the SHA-256 of bytes, text (UTF-8) or JSON values."""
    content = content if isinstance(content, (bytes, str)) else json.dumps(content)
    content = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return hashlib.sha256(content).hexdigest()[:digits]


def digest_of_parts(parts: Iterable[str | np.ndarray]) -> str:
    """Return 16 hexadecimal digits of texts and arrays in their order."""
    contents = (
        part.encode("utf-8", "surrogatepass") if isinstance(part, str) else np.asarray(part).tobytes() for part in parts
    )
    return digest(b"".join(content + b"\n" for content in contents))


def flat(data: Any, prefix: str = "", whole_lists: bool = False) -> dict[str, Any]:
    """Flatten nested JSON values to dotted names: ``{"task.source.size": 3000}``. ``whole_lists``: keep lists of plain
    values as values; otherwise name each item by its index.
    """
    if isinstance(data, list) and (not whole_lists or any(isinstance(item, dict) for item in data)):
        data = dict(enumerate(data))
    if not isinstance(data, dict):
        return {prefix: data}
    parts = {f"{prefix}.{name}" if prefix else str(name): item for name, item in data.items()}
    return {dotted: plain for name, item in parts.items() for dotted, plain in flat(item, name, whole_lists).items()}


def pack(array: np.ndarray) -> dict[str, Any]:
    """Convert an array of numbers or text to JSON values, bit for bit, compressed."""
    data = base64.b85encode(zlib.compress(array.tobytes())).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """Rebuild the array from the output of ``pack``; no more is decompressed than its shape needs."""
    size = math.prod(packed["shape"]) * np.dtype(packed["dtype"]).itemsize
    data = zlib.decompressobj().decompress(base64.b85decode(packed["data"]), size + 1) if size > 0 else b""
    return np.frombuffer(data, packed["dtype"]).reshape(packed["shape"]).copy()


def _is_json_object(value: dict[Any, Any]) -> bool:
    """Whether a dictionary can be written unchanged: text keys, and it does not look like one of these objects."""
    return all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)).startswith(_SIGN))


def _write_clock(value: datetime.datetime | datetime.time) -> list[Any]:
    """Return the ISO text, the time zone's name or None, and the fold (which of two equal clock readings it is)."""
    zone = value.tzinfo
    if isinstance(zone, zoneinfo.ZoneInfo) and zone.key:
        return [value.replace(tzinfo=None).isoformat(), zone.key, value.fold]
    return [value.isoformat(), None, value.fold]


def _read_clock(kind: Any, data: list[Any]) -> Any:
    text, zone, fold = data
    value = kind.fromisoformat(text).replace(fold=fold)
    return value if zone is None else value.replace(tzinfo=zoneinfo.ZoneInfo(zone))


_KINDS = {
    "timestamp": (
        None,
        lambda value: [value.value, None if value.tz is None else str(value.tz)],
        lambda data: importlib.import_module("pandas").Timestamp(data[0], tz=data[1]),
    ),
    "tuple": (tuple, list, tuple),
    "dict": (dict, lambda value: [list(pair) for pair in value.items()], dict),
    # Equal sets are written alike, whatever order they are walked in.
    "set": (set, lambda value: sorted(value, key=lambda item: repr(to_json(item))), set),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, _write_clock, lambda data: _read_clock(datetime.time, data)),
    "datetime": (datetime.datetime, _write_clock, lambda data: _read_clock(datetime.datetime, data)),
    "timedelta": (
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda data: datetime.timedelta(*data),
    ),
    "uuid": (uuid.UUID, str, uuid.UUID),
    "array": (np.ndarray, pack, unpack),
    "scalar": (np.generic, lambda value: pack(np.asarray(value)), lambda data: unpack(data)[()]),
}
"""Conversions by the kind's name in the file: the type, to values that ``to_json`` converts in turn, and back."""
