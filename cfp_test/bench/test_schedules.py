"""Readings of traces: when collectives begin, and times for the compiler."""

import pytest

from cfp_test.bench.schedules import Sending, main, profile_text, sending
from cfp_test.scripts.rows import Rows

MS = 1e6

# Two steps of 4 ms: a product of 1 ms, a copy, and a product that waits for a gather
# that began as the first one ended.
STEP = (
    ("nvjet_long custom-call.1", 0.0, 1.0),
    ("nccl_gather all-gather.7", 0.97, 1.2),
    ("loop_copy copy.3", 1.0, 1.1),
    ("nvjet_long custom-call.2", 1.2, 2.2),
    ("nccl_reduce all-reduce.9", 1.22, 1.5),
    ("nccl_gather all-gather.8", 1.7, 2.0),
    ("nccl_gather all-gather.6", 2.3, 2.5),
    ("loop_copy copy.4", 3.9, 4.0),
)
EVENTS = [
    (device, name, ((start + step * 4.0) * MS, (end + step * 4.0) * MS))
    for device in ("/device:GPU:0", "/device:GPU:1")
    for step in range(2)
    for name, start, end in STEP
]

MODULE = """HloModule step, is_scheduled=true

%wrapped (x: f32[2]) -> f32[4] {
  %all-gather.7 = f32[4] all-gather(%x)
}

ENTRY %main (p: f32[2]) -> f32[4] {
  %custom-call.1 = f32[2] custom-call(%p), metadata={scheduling_name="product"}
  %all-gather-start = f32[4] all-gather-start(%p), metadata={scheduling_name="begin"}
  %all-gather-done = f32[4] all-gather-done(%all-gather-start)
  %all-reduce-start.1 = f32[4] all-reduce-start(%all-gather-done)
  %all-reduce-done.1 = f32[4] all-reduce-done(%all-reduce-start.1)
  %all-gather.8 = f32[4] all-gather(%p)
  ROOT %all-gather.6 = f32[4] all-gather(%p)
}
"""


def test_collectives_that_begin_as_a_long_kernel_ends_are_counted():
    # No kernel computes from 1.1 to 1.2 and from 2.2 to 3.9 ms.
    assert sending(EVENTS, 2) == pytest.approx(
        Sending(
            waiting_ms=1.8,
            sending_ms=0.23 + 0.28 + 0.3 + 0.2,
            between=1.0,
            with_long=1.0,
            inside=1.0,
            at_end=1.0,
        )
    )


def test_a_trace_without_collectives_says_nothing():
    assert sending([], 2) is None
    assert sending([e for e in EVENTS if "nccl" not in e[1]], 2) is None


def test_the_compiler_is_told_the_names_that_it_schedules():
    later = [
        (device, name, (start, end + (0.1 * MS if "all-gather.7" in name else 0)))
        for device, name, (start, end) in EVENTS
        if device.endswith("1")
    ]
    events = [e for e in EVENTS if e[0].endswith("0")] + later
    told = profile_text(MODULE, events, 2, 1000.0).decode().splitlines()
    assert 'costs { name: "product" cost_us: 1000.000 }' in told
    assert 'costs { name: "begin" cost_us: 1230.000 }' in told
    assert 'costs { name: "all-reduce-start.1" cost_us: 1280.000 }' in told
    assert 'costs { name: "all-gather.6" cost_us: 1200.000 }' in told
    assert 'costs { name: "copy.4" cost_us: 100.000 }' in told


def test_other_collectives_than_the_module_has_are_refused():
    less = [e for e in EVENTS if "all-gather.8" not in e[1]]
    with pytest.raises(ValueError, match="3 collectives ran, the module has 4"):
        profile_text(MODULE, less, 2, 0.0)


def test_sets_take_turns_on_virtual_devices(tmp_path):
    out = tmp_path / "rows.json"
    words = "--steps bert=first --sets overlap2 large+notriton --turns 2 --tiny"
    main(["--out", str(out), *words.split()])
    head = {"sets": ["overlap2", "large+notriton"], "profiled": []}
    rows = Rows(out, head).rows
    assert [row["options"] for row in rows] == ["", "overlap2", "large+notriton"]
    assert all(len(row["samples_ms"]) == 2 for row in rows)
    assert all(row["step"] == "bert=first" for row in rows)
