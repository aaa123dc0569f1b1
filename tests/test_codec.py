"""What is written as JSON comes back equal and of the same types, however it is nested."""

import datetime
import decimal
import json
import uuid
import zoneinfo

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.codec import digest, digest_of_parts, from_json, to_json

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.just("$tuple"), st.just("$dict"), st.dates())
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.decimals(), st.dates(),
    st.times(timezones=st.sampled_from([None, BERLIN])), st.datetimes(), st.timedeltas(), st.uuids(),
    st.datetimes(timezones=st.sampled_from([BERLIN, datetime.UTC])),
)  # fmt: skip
NESTED = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def again(value):
    return from_json(json.loads(json.dumps(to_json(value))))


@given(NESTED)
def test_every_value_comes_back_with_its_type(value):
    assert repr(again(value)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1), np.int64(3), np.bool_(True), np.str_("a"), np.datetime64("2025-07-01T12:00:00.000000001"),
        np.arange(6, dtype=np.int8).reshape(2, 3), np.array(["a", "bc"]), np.array([np.nan, -0.0]),
        datetime.datetime(2025, 10, 26, 2, 30, tzinfo=BERLIN, fold=1),
        datetime.datetime(2025, 7, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-5, minutes=-30))),
        pandas.Timestamp("2025-07-01T12:00:00.000000001"), pandas.Timestamp("2025-07-01", tz="Europe/Berlin"),
    ],
)  # fmt: skip
def test_numpys_values_and_times_come_back_exactly(value):
    found = again({"nested": [value]})["nested"][0]
    assert type(found) is type(value) and repr(found) == repr(value)
    if isinstance(value, datetime.datetime):
        assert found.fold == value.fold and found.utcoffset() == value.utcoffset()


def test_what_json_has_stays_as_it_is():
    value = {"level": 2, "rows": ["a", 1.5, None, True], "inner": {"$tuple": 1, "b": 2}}
    assert to_json(value) == value


def test_a_set_is_written_alike_in_any_order():
    one, other = set([0, 8]), set([8, 0])  # of equal hashes modulo the table: walked in the order of insertion
    assert list(one) != list(other) and to_json(one) == to_json(other) == {"$set": [0, 8]}
    assert again({(1, 2), (3,)}) == {(1, 2), (3,)}


class Odd(str):
    """Text that is more than text."""


@pytest.mark.parametrize(
    ("value", "named"), [(object(), "object"), ([Odd("a")], "Odd"), (np.array([None]), "ndarray of object")]
)
def test_what_cannot_come_back_is_refused_by_its_type(value, named):
    with pytest.raises(TypeError, match=named):
        to_json(value)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"\$quaternion"):
        from_json([{"$quaternion": 1}])


def test_decimals_and_bytes_are_readable():
    assert to_json([decimal.Decimal("1.50"), b"ab"]) == [{"$decimal": "1.50"}, {"$bytes": "YWI="}]
    assert to_json(uuid.UUID(int=1)) == {"$uuid": "00000000-0000-0000-0000-000000000001"}


@pytest.mark.parametrize(
    ("content", "hexadecimal"),
    [
        (b"abc", "ba7816bf8f01cfea"), ("abc", "ba7816bf8f01cfea"), ("", "e3b0c44298fc1c14"), ("ä", "33e6d73fee82904c"),
        (["ä", 1, None], "b29fbf8d4ab908ea"), ({"a": 1.5}, "e7e254618d40dbce"),
    ],
)  # fmt: skip
def test_digests_are_those_of_sha256(content, hexadecimal):
    assert digest(content) == hexadecimal and digest(content, 64).startswith(hexadecimal)


def test_a_digest_of_parts_reads_texts_and_arrays_in_their_order():
    assert digest_of_parts(["a", "\ud800"]) == "997872a7656194a0" != digest_of_parts(["\ud800", "a"])
    assert digest_of_parts([np.asarray([1, 2], np.int32)]) == "7fbccb31d78a01c6"
