"""Predicted steps: what adds up, what hides, and what the records say."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cfp.cost import step_time as step_time_module
from cfp.cost.schedule import Computed, Schedule, Sent
from cfp.cost.step_time import (
    Constants,
    StepPredictor,
    partitioned_compute_ms,
    step_time,
)
from cfp.profiling.builder import Built
from cfp.profiling.key import ProfileKey
from cfp.profiling.rates import Rates, sent_share
from cfp.profiling.store import ProfileStore
from cfp_test.bench import played_fit, played_four_page, played_links_page, played_page
from cfp_test.bench.carried import (
    carried_over,
    in_a_row,
    launch_ms_of,
    without_launches,
)
from cfp_test.bench.one_as_n import rank_correlation
from cfp_test.bench.one_as_n_data import FILE

_RATES = Rates(
    mesh=(("x", 4), ("y", 2)),
    curves={
        (kind, group): ((1000, 1.0), (10_000, 10.0))
        for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
        for group in (("x",), ("y",), ("x", "y"))
    },
    matmul_flops_per_ms={"float32": 1e9, "bfloat16": 1e9},
    memory_bytes_per_ms=1e9,
)
_TWO = played_page.rates_of()
_PLAIN = Constants(sustained=1.0, slowed_by=0.0, slowed_by_all_reduce=0.0)


def _product(ms: float) -> Computed:
    return Computed(flops=ms * 1e9, moved_bytes=0.0, kernels=0)


def _gather(start: int, done: int, size: int = 1000) -> Sent:
    return Sent(kind="all-gather", bytes=size, group_size=2, start=start, done=done)


def test_without_overlap_all_times_add_up():
    schedule = Schedule((_product(2.0), _product(3.0)), (_gather(1, 1, 4000),))
    found = step_time(schedule, _RATES, constants=_PLAIN)
    assert found.total_ms == pytest.approx(2 + 3 + 4)
    assert (found.exposed_ms, found.hidden_ms) == (pytest.approx(4.0), 0)


@pytest.fixture
def read(monkeypatch):
    """The programs whose text was read, each of which is its schedule."""
    found: list[Any] = []

    def schedule_of(text):
        found.append(text)
        return text

    monkeypatch.setattr(step_time_module, "schedule_of", schedule_of)
    return found


@pytest.fixture
def predictor(tmp_path):
    with ProfileStore(tmp_path / "profiles.sqlite") as store:
        yield StepPredictor(rates=_RATES, store=store, here=(), constants=_PLAIN)


@pytest.fixture
def ask(predictor, read, monkeypatch):
    """Predicts programs of one computation, whose runs take 10, 12, 11 ms; and runs.

    A program is its schedule. Another one may be what ran in place of it.
    """
    ran: list[str] = []

    def run_local(built, job, program, mesh, *, timing):
        ran.append(job.label)
        ms = (10.0, 12.0, 11.0)[len(ran) - 1]
        return built.record("ok", samples_ms=(ms - 0.5, ms, ms + 4.0))

    monkeypatch.setattr(step_time_module, "run_local", run_local)
    monkeypatch.setattr(step_time_module, "computation_of", lambda text: "any")
    monkeypatch.setattr(step_time_module, "limits_of", lambda device: (0.0, 0.0))
    device = np.array(SimpleNamespace(platform="cpu"))
    mesh: Any = SimpleNamespace(devices=device, local_devices=[None])

    def predicted(schedule, *options, local=None):
        chosen = [("options", repr(options))] if options else []
        key = ProfileKey((("ops", "a"), *chosen))
        words = {"key": key, "options": options, "donated": (), "label": "a step"}
        job: Any = SimpleNamespace(**words)
        text: Any = SimpleNamespace(as_text=lambda: schedule)
        is_local = predictor.here is not None and predictor.wants_local(job, "")
        alone: Any = SimpleNamespace(as_text=lambda: local or schedule)
        inner = Built(key=key, compiled=alone) if is_local else None
        built = Built(key=key, compiled=text, local=inner)
        program: Any = None
        return predictor(built, job, program, mesh).samples_ms

    return predicted, ran


_JOINED = ("xla_gpu_all_reduce_combine_threshold_bytes", "1")


def _alone(*sent: Sent, first_ms: float = 5.0, copied_ms: float = 0.0) -> Schedule:
    copies = Computed(flops=0.0, moved_bytes=copied_ms * 1e9, kernels=0)
    return Schedule((_product(first_ms), copies, _product(5.0)), sent)


def _reduced(start: int, size: int) -> Sent:
    return Sent(kind="all-reduce", bytes=size, group_size=2, start=start, done=start)


def test_programs_whose_collectives_are_joined_share_the_runs_of_a_computation(ask):
    """They differ in what they send, and in what they copy for it."""
    predicted, ran = ask
    apart = _alone(_reduced(1, 1000), _reduced(3, 1000))
    together = _alone(_reduced(3, 1500), copied_ms=1.0)
    assert predicted(apart) == pytest.approx([10.0 + 2.0])
    # Of 10 ms that 10 were estimated for, 11 are expected for 11.
    assert predicted(together, _JOINED) == pytest.approx([11.0 + 1.5])
    assert len(ran) == 1
    # In another turn it runs once more, whichever comes first; so it does three times.
    assert predicted(together, _JOINED) == pytest.approx([12.0 * 1.1 + 1.5])
    assert predicted(apart) == pytest.approx([12.0 + 2.0])
    assert len(ran) == 2
    assert predicted(apart) == pytest.approx([11.0 + 2.0])
    assert predicted(apart) == pytest.approx([10.0 + 2.0])
    assert len(ran) == 3


def test_a_computation_that_ran_once_before_runs_as_often_as_others(ask, predictor):
    predicted, ran = ask
    predicted(_alone())
    for most in (3, 3):
        predictor.keep_only([])
        predictor.turns.clear()  # As in another process.
        assert predicted(_alone()) == pytest.approx([10.0])
        assert predicted(_alone()) == pytest.approx([12.0])
        assert predicted(_alone()) == pytest.approx([11.0])
        assert len(ran) == most


def test_texts_are_read_once(ask, read):
    """That of the program, and that of its computation by itself."""
    predicted, _ = ask
    assert [*predicted(_alone()), *predicted(_alone())] == [10.0, 12.0]
    assert len(read) == 2


def test_what_a_computation_by_itself_does_without_is_added(ask, predictor):
    """In each turn, and in another process, which finds the time in the store."""
    predicted, ran = ask
    for _ in range(2):
        takes = [*predicted(_alone(copied_ms=3.0), local=_alone(copied_ms=1.0))]
        takes += predicted(_alone(copied_ms=3.0), local=_alone(copied_ms=1.0))
        takes += predicted(_alone(copied_ms=3.0), local=_alone(copied_ms=1.0))
        assert takes == pytest.approx([12.0, 14.0, 13.0])
        predictor.keep_only([])
        predictor.turns.clear()
    assert len(ran) == 3


def test_where_nothing_runs_a_step_is_predicted_once(ask, read, predictor):
    predicted, ran = ask
    object.__setattr__(predictor, "here", None)
    before = predicted(_alone())
    [known] = predictor.known.values()
    assert predicted(_alone()) == before
    assert next(iter(predictor.known.values())) is known
    assert len(read) == 1 and not ran


def test_under_a_memory_limit_no_computation_is_shared(ask):
    """The schedule decides what is computed again."""
    predicted, _ = ask
    limited = ("xla_gpu_memory_limit_slop_factor", "50")
    predicted(_alone(first_ms=15.0), limited)
    again = _alone(first_ms=15.0, copied_ms=1.0)
    # Shared, 10 ms would be those of another computation, and scaled to 10.5.
    assert predicted(again, limited, _JOINED) == pytest.approx([11.0])


def test_with_options_that_change_a_computation_it_goes_by_its_own_text(ask):
    predicted, ran = ask
    limited = ("xla_gpu_memory_limit_slop_factor", "50")
    predicted(_alone(first_ms=15.0))
    copies = _alone(first_ms=15.0, copied_ms=1.0)
    assert predicted(copies, limited) == pytest.approx([11.0])
    assert len(ran) == 1  # The text is the same.


def test_what_is_computed_meanwhile_hides_a_collective():
    schedule = Schedule((_product(2.0), _product(3.0)), (_gather(0, 1, 3000),))
    found = step_time(schedule, _RATES, constants=_PLAIN)
    assert found.total_ms == pytest.approx(6.0)
    assert (found.hidden_ms, found.exposed_ms) == (pytest.approx(2), pytest.approx(1))


def test_what_is_not_waited_for_delays_what_starts_behind_it():
    sent = (_gather(0, 2, 5000), _gather(1, 1, 1000))
    schedule = Schedule((_product(2.0), _product(3.0)), sent)
    found = step_time(schedule, _RATES, constants=_PLAIN)
    assert found.total_ms == pytest.approx(2 + 3 + 1 + 3)


def test_at_half_speed_nothing_is_gained_by_overlap():
    overlapped = Schedule((_product(2.0), _product(3.0)), (_gather(0, 2, 4000),))
    behind = Schedule((_product(2.0), _product(3.0)), (_gather(2, 2, 4000),))
    half = Constants(sustained=1.0, slowed_by=1.0, slowed_by_all_reduce=1.0)
    both = [step_time(one, _RATES, constants=half) for one in (overlapped, behind)]
    assert both[0].total_ms == pytest.approx(both[1].total_ms)


@pytest.mark.parametrize("measured_ms", [9.0, 6.0, 5.0])
def test_a_measured_computation_is_kept(measured_ms):
    parts = (_product(4.0), Computed(flops=0.0, moved_bytes=2e9, kernels=0))
    for schedule in (Schedule(parts, ()), Schedule((), ())):
        found = step_time(
            schedule, _RATES, computation_ms=measured_ms, constants=_PLAIN
        )
        assert found.total_ms == pytest.approx(measured_ms)


@pytest.mark.parametrize(
    ("moved_bytes", "kernels", "expected_ms"),
    [
        (4e9, 3, 50.0),
        (10e9, 5, 50.0 - 6.0 - 2 * 0.002),  # Copies in place of gathers.
        (1e9, 1, 50.0 + 3.0 + 2 * 0.002),  # No copies to bring a dim to the front.
        (100e9, 3, 0.0),
    ],
)
def test_kernels_of_one_of_two_programs_alone_count(moved_bytes, kernels, expected_ms):
    own = (
        Computed(flops=0.0, moved_bytes=1e9, kernels=1),
        Computed(flops=1e9, moved_bytes=3e9, kernels=2),
    )
    schedule = Schedule(own, (_gather(0, 1), _gather(1, 2, 4_000_000_000)))
    ran = Computed(flops=1e9, moved_bytes=moved_bytes, kernels=kernels)
    found = partitioned_compute_ms(schedule, ran, _RATES, 50.0)
    assert found == pytest.approx(expected_ms)


def test_what_runs_several_times_counts_as_often():
    several = tuple(replace(one, times=3) for one in (_gather(0, 0), _gather(1, 1)))
    apart = tuple(one for s in several for one in 3 * (replace(s, times=1),))
    both = [Schedule((_product(40.0),), sent) for sent in (several, apart)]
    steps = [step_time(one, _RATES, constants=_PLAIN).total_ms for one in both]
    assert steps[0] == pytest.approx(steps[1])


def test_an_all_reduce_takes_no_longer_than_its_two_halves():
    slow = dict(_RATES.curves)
    slow["all-reduce", ("y",)] = ((1000, 50.0), (10_000, 500.0))
    rates = replace(_RATES, curves=slow)
    one = Sent(kind="all-reduce", bytes=1000, group_size=2, start=0, done=0)
    found = step_time(Schedule((_product(1.0),), (one,)), rates, constants=_PLAIN)
    assert found.total_ms == pytest.approx(3.0)


def test_curves_carried_over_to_more_devices_grow_by_what_each_sends():
    two = Rates.default((("x", 2),))
    four = carried_over(two, (("x", 4),))
    size = 1 << 28
    for kind in ("all-reduce", "all-gather", "all-to-all"):
        floor = two.curves[kind, ("x",)][0][1]
        before = two.collective_ms(kind, ("x",), size) - floor
        after = four.collective_ms(kind, ("x",), size) - floor
        assert after / before == pytest.approx(
            sent_share(kind, 4) / sent_share(kind, 2)
        )


@pytest.mark.parametrize("bytes_per_ms", [2.2e7, 3.5e7])
def test_without_launches_times_follow_the_bandwidth(bytes_per_ms):
    """A sample of 2 ms or more had one launch, of however many programs in a row."""
    sizes, launch_ms = (1 << 16, 1 << 22, 1 << 25, 1 << 28), 1.0
    curve = []
    for size in sizes:
        count = 1
        while launch_ms + count * size / bytes_per_ms < 2.0:
            count += 1
        curve.append((size, size / bytes_per_ms + launch_ms / count))
    assert [in_a_row(ms) for _, ms in curve][3] == 1 < in_a_row(curve[0][1])
    assert launch_ms_of([tuple(curve)]) == pytest.approx(launch_ms)
    found = dict(without_launches(tuple(curve), launch_ms, 0.0))
    for size in sizes[2:]:
        assert found[size] == pytest.approx(size / bytes_per_ms)
    assert found[1 << 22] == pytest.approx(found[1 << 25] / 8)
    assert found[1 << 16] == pytest.approx(found[1 << 25] / 512)


@pytest.fixture(scope="module")
def played():
    return played_page.pairs(json.loads(played_page.FILE.read_text()), _TWO)


def test_steps_of_two_devices_are_predicted_from_one(played):
    assert len(played) >= 12
    off = played_page.errors(played, _TWO)
    assert statistics.median(map(abs, off)) < 0.03
    assert max(map(abs, off)) < 0.08
    steps_ms = [one.measured_ms for one in played]
    predicted = [ms * (1 + e) for ms, e in zip(steps_ms, off, strict=True)]
    assert rank_correlation(predicted, steps_ms) > 0.95


@pytest.mark.parametrize(
    ("links", "middle", "worst"), [("two", 0.03, 0.08), ("off", 0.05, 0.12)]
)
def test_steps_over_fast_and_slow_links_are_predicted(links, middle, worst):
    data = json.loads(played_links_page.FILE.read_text())
    found = played_links_page.steps(data, links)
    assert len(found) >= 12
    errors = played_links_page.summary(found)
    assert errors[0] <= middle and errors[1] <= worst and errors[3] >= 0.95


def test_steps_of_four_devices_are_predicted_from_one():
    """No constant is fitted to them."""
    found = played_four_page.pairs(json.loads(played_four_page.FILE.read_text()))
    assert len(found) >= 60
    for middle, worst, rank in played_four_page.summary(found).values():
        assert middle < 0.04 and worst < 0.10 and rank > 0.85


def test_a_hidden_all_reduce_slows_a_step_down_less_than_a_gather():
    def total(kind):
        one = Sent(kind=kind, bytes=1000, group_size=2, start=0, done=1)
        schedule = Schedule((_product(9.0),), (one,))
        constants = Constants(sustained=1.0, slowed_by=0.8, slowed_by_all_reduce=0.25)
        return step_time(schedule, _RATES, constants=constants).total_ms

    assert total("all-gather") == pytest.approx(9 + 0.8)
    assert total("all-reduce") == pytest.approx(9 + 0.25)


def test_a_gpu_that_waits_raises_its_clock():
    def total(waits_ms, highest, power=0.3):
        sent = (_gather(1, 1, 1000 * waits_ms),) if waits_ms else ()
        schedule = Schedule((_product(10.0),), sent)
        constants = replace(_PLAIN, waiting=power)
        return step_time(
            schedule, _RATES, highest_clock=highest, constants=constants
        ).total_ms

    assert total(0, 1.25) == pytest.approx(10.0)
    assert total(50, 1.25) == pytest.approx(10 / 1.25 + 50)  # Its highest clock.
    assert total(50, 1.0) == pytest.approx(60.0)
    assert 10 / 1.25 + 2 < total(2, 1.25) < 12
    assert total(2, 1.25, power=0.9) > total(2, 1.25)
    assert total(50, 1.25, power=1.0) == pytest.approx(60.0)  # Waiting saves nothing.


@pytest.mark.parametrize(
    ("clock_mhz", "power_watts", "expected"),
    [
        (1584.0, 680.0, 1.25),
        (1200.0, 480.0, 1.0),
        (1980.0, 690.0, 1.0),
        (0.0, 0.0, 1.0),
    ],
    ids=["power", "locked", "highest", "unknown"],
)
def test_a_clock_has_headroom_where_power_holds_it_down(
    clock_mhz, power_watts, expected
):
    """A locked clock stays where it is, however long the GPU waits."""
    seen = SimpleNamespace(clock_mhz=clock_mhz, power_watts=power_watts)
    assert step_time_module._headroom(seen, 1980.0, 700.0) == pytest.approx(expected)
    assert step_time_module._headroom(seen, 0.0, 0.0) == 1.0


def test_computations_are_estimated_from_rates(played):
    off = played_page.by_rates(played, _TWO)
    assert statistics.median(map(abs, off)) < 0.03
    assert max(map(abs, off)) < 0.05


def test_the_constants_are_those_that_fit():
    assert played_fit.fit() == Constants()


def test_programs_need_on_one_device_what_they_need_on_four():
    data = json.loads(FILE.read_text())
    for row in data["programs"]:
        if row["recorded_bytes"] and "analytical" not in row["name"]:
            nearest = min(abs(row["peak_bytes"] / b - 1) for b in row["recorded_bytes"])
            assert nearest < 0.01, row["name"]
