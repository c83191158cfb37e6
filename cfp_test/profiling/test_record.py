import dataclasses
import json
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfp.profiling.record import STATUSES, Collective, ProfileRecord

OK = ProfileRecord(
    key="k",
    parts=(("segment", "s"), ("mesh", "4")),
    status="ok",
    samples_ms=(4.0, 1.0, 2.0, 3.0),
    argument_bytes=10,
    collectives=(Collective(kind="all-reduce", bytes=8, group_size=4, count=2),),
    created="2026-01-02T03:04:05+00:00",
)

counts = st.integers(min_value=0, max_value=2**53)
times = st.floats(min_value=0, allow_infinity=False, allow_nan=False)
collectives = st.builds(
    Collective, kind=st.text(), bytes=counts, group_size=counts, count=counts
)


@st.composite
def records(draw) -> ProfileRecord:
    status = draw(st.sampled_from(STATUSES))
    return ProfileRecord(
        key=draw(st.text()),
        parts=tuple(draw(st.lists(st.tuples(st.text(), st.text()), max_size=4))),
        status=status,
        reason=draw(st.text()),
        samples_ms=tuple(
            draw(st.lists(times, min_size=1 if status == "ok" else 0, max_size=5))
        ),
        choice=draw(st.text(max_size=9)),
        argument_bytes=draw(counts),
        output_bytes=draw(counts),
        alias_bytes=draw(counts),
        temp_bytes=draw(counts),
        code_bytes=draw(counts),
        drift=draw(st.just(1.0) | times),
        build_seconds=draw(times),
        run_seconds=draw(times),
        collectives=tuple(draw(st.lists(collectives, max_size=3))),
        created=draw(st.datetimes()).isoformat() + "Z",
    )


@settings(deadline=None, max_examples=100)
@given(records())
def test_json_round_trip(record: ProfileRecord):
    text = record.to_json()
    assert "\n" not in text
    copy = ProfileRecord.from_json(text)
    assert copy == record
    assert hash(copy) == hash(record)
    assert copy.to_json() == text


def test_drift_is_written_and_counts():
    drifted = dataclasses.replace(OK, drift=1.1)
    assert json.loads(drifted.to_json())["drift"] == 1.1
    assert ProfileRecord.from_json(drifted.to_json()).time_ms == 1.1 * OK.time_ms


def test_summaries_of_an_ok_record():
    assert OK.ok
    assert OK.time_ms == statistics.median([1, 2, 3, 4]) == 2.5


def test_what_lives_in_donated_memory_counts_once():
    record = dataclasses.replace(
        OK, argument_bytes=100, output_bytes=30, alias_bytes=20, temp_bytes=7
    )
    assert record.peak_bytes == 117
    assert dataclasses.replace(record, code_bytes=2).peak_bytes == 119


def test_a_failure_costs_infinitely_much_and_keeps_its_samples():
    record = dataclasses.replace(OK, status="crashed", reason="bus error")
    assert not record.ok
    assert record.time_ms == math.inf
    assert record.samples_ms == OK.samples_ms


def test_defaults_are_a_plain_failure_made_now():
    record = ProfileRecord(key="k", parts=(), status="timeout")
    assert record.created.endswith("+00:00")
    assert ProfileRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "fine"}, "status"),
        ({"samples_ms": ()}, "samples_ms"),
        ({"samples_ms": (math.nan,)}, "samples_ms"),
        ({"samples_ms": (math.inf,)}, "samples_ms"),
        ({"build_seconds": -1.0}, "build_seconds"),
        ({"created": "yesterday"}, "created"),
        ({"created": "2026-01-02T03:04:05"}, "created"),
        ({"created": "2026-01-02T03:04:05+01:00"}, "created"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ProfileRecord.from_json(json.dumps(json.loads(OK.to_json()) | changes))


def test_no_field_may_be_unknown_and_none_without_a_default_missing():
    data = json.loads(OK.to_json())
    assert set(data) == {item.name for item in dataclasses.fields(ProfileRecord)}
    for name in ("key", "parts", "status", "samples_ms"):
        less = {key: value for key, value in data.items() if key != name}
        with pytest.raises(ValueError, match=name):
            ProfileRecord.from_json(json.dumps(less))
    with pytest.raises(ValueError, match="colour: expected no field of this name"):
        ProfileRecord.from_json(json.dumps(data | {"colour": "red"}))
    del data["collectives"][0]["count"]
    with pytest.raises(ValueError, match=r"collectives\[0\].count: .* got nothing"):
        ProfileRecord.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", 3),
        ("parts", {"a": "b"}),
        ("parts", [["a", "b", "c"]]),
        ("parts", [["a", 1]]),
        ("parts", ["ab"]),
        ("status", None),
        ("samples_ms", 1.0),
        ("samples_ms", ["1.0"]),
        ("samples_ms", [True]),
        ("temp_bytes", 1.0),
        ("temp_bytes", True),
        ("temp_bytes", -1),
        ("run_seconds", "1"),
        ("collectives", [[]]),
        ("created", 5),
    ],
)
def test_wrong_types_are_refused(name, value):
    data = json.loads(OK.to_json()) | {name: value}
    with pytest.raises(ValueError, match=name):
        ProfileRecord.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"record"'])
def test_what_is_no_record_is_refused(text):
    with pytest.raises(ValueError):
        ProfileRecord.from_json(text)
