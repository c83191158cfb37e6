"""The fastest of several variants: what wins, what is out, and interrupts."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cfp
from cfp import api
from cfp import variants as turns
from cfp.context import DetailedSettings
from cfp.errors import (
    CfpError,
    MemoryBudgetError,
    StepNotTraceable,
)
from cfp.platform import mesh_shapes
from cfp.printable import format_bytes
from cfp.race import turns as racing
from cfp.search.guided import Estimate

pytestmark = pytest.mark.usefixtures("compiled_once", "analyzed_once")

# A preset is not measured, but races.
PRESET = {"preset": "data_parallel", "settings": cfp.PlannerSettings(measure=True)}
ROWS = 512


def make_step(parts):
    """A wide layer, whose activations are all the memory that counts."""

    def loss_fn(w, x):
        return ((jnp.tanh(jnp.tanh(x @ w) @ w.T) - x) ** 2).mean() / parts

    def step(w, x):
        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(w, part)), 0

        split = x.reshape(-1, parts, x.shape[1]).swapaxes(0, 1)
        (loss, gradient), _ = jax.lax.scan(add, (0.0, jnp.zeros_like(w)), split)
        return w - 0.1 * gradient, loss

    return step


def variant(name, sizes=(4,), parts=1):
    count = int(np.prod(sizes))
    axes = ("x", "y", "z")[: len(sizes)]
    return cfp.Variant(
        name=name,
        fn=make_step(parts),
        args=(
            jax.ShapeDtypeStruct((16, 128), jnp.float32),
            jax.ShapeDtypeStruct((ROWS, 16), jnp.float32),
        ),
        mesh=jax.make_mesh(sizes, axes, devices=jax.devices()[:count]),
    )


SHAPES = [variant("line", (8,)), variant("flat", (2, 4)), variant("cube", (2, 2, 2))]
BY_AXES = {1: "line", 2: "flat", 3: "cube"}


@pytest.fixture
def timed(monkeypatch):
    """Has programs take the milliseconds that a test says, by variant and race.

    Gives the labels of what ran.
    """
    ran = []

    def say(own, together):
        def run(built, job, program, mesh, *, timing):
            name = BY_AXES[len(mesh.axis_names)]
            table = together if job.label.startswith(f"{name}: ") else own
            ran.append(job.label)
            return built.record("ok", samples_ms=[table[name]], run_seconds=0.1)

        monkeypatch.setattr(racing, "run", run)
        return ran

    return say


@pytest.fixture
def altered(monkeypatch):
    """Alters what is found, in turn; gives the list of it."""
    whole = api.run_passes
    planned = []

    def start(change, **more):
        def find(analyzed, options):
            found = whole(analyzed, replace(options, **more))
            planned.append(change(found, len(planned)))
            return planned[-1]

        monkeypatch.setattr(api, "run_passes", find)
        return planned

    return start


class Clock:
    """Time that passes while variants are estimated and planned, and else stands.

    Attributes:
        estimated, planned: variants, by their meshes, in the order of their turns.
        given: seconds that planning each was given.
    """

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.estimated, self.planned, self.given = [], [], []
        self._patch, self._plan = monkeypatch, api.run_passes
        self._patch.setattr(turns, "now", lambda: self.now)

    def estimates_take(self, seconds, time_ms=lambda analyzed: 1.0):
        """Has each estimate take some seconds, and say what a test says."""

        def estimate(context, analysis):
            self.estimated.append(BY_AXES[len(context.mesh.axis_names)])
            self.now += seconds
            if context.settings.progress is not None:
                context.settings.progress("estimating")
            ms = time_ms(context)
            return Estimate(time_ms=ms, fits=True)

        self._patch.setattr(turns, "estimate", estimate)

    def plans_take(self, *seconds, needing=None):
        """Has planning each variant take some seconds, the last of them again.

        Args:
            needing: bytes that a variant lacks, by its mesh; of others it has enough.
        """

        def find(analyzed, options):
            name = BY_AXES[len(analyzed.mesh.axis_names)]
            self.planned.append(name)
            self.given.append(options.settings.seconds)
            self.now += [*seconds, *seconds[-1:] * 9][len(self.planned) - 1]
            if (needed := (needing or {}).get(name)) is not None:
                raise MemoryBudgetError(f"{needed} B.", smallest_feasible_bytes=needed)
            return self._plan(analyzed, options)

        self._patch.setattr(api, "run_passes", find)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def times_of(fastest):
    return {one.name: one.step_ms for one in fastest.plan.figures.variants}


def notes(fastest):
    return {one.name: one.note for one in fastest.plan.figures.variants}


def estimates_of(fastest):
    return [one.estimated_ms for one in fastest.plan.figures.variants]


def is_raced(fastest):
    return fastest.plan.figures.variants_raced


# ----------------------------------------------------------------------- what wins


@pytest.mark.smoke
def test_the_fastest_in_the_last_race_wins(timed, tmp_path):
    own = {"line": 1.0, "flat": 2.0, "cube": 3.0}
    together = {"line": 3.0, "flat": 2.5, "cube": 2.6}
    ran = timed(own, together)
    found = cfp.plan_fastest(SHAPES, **PRESET, cache_dir=tmp_path)
    assert (found.name, is_raced(found)) == ("flat", True)
    assert times_of(found) == together
    assert set(notes(found).values()) == {""}
    assert found.plan.mesh_axes == (("x", 2), ("y", 4))
    assert found.plan.measured_ms == own["flat"]

    # Everything is in the store by now, and what was raced is not raced again.
    ran.clear()
    again = cfp.plan_fastest(SHAPES, **PRESET, cache_dir=tmp_path)
    assert (times_of(again), ran) == (together, [])
    # Among others, it is: only times of one race compare.
    cfp.plan_fastest(SHAPES[:2], **PRESET, cache_dir=tmp_path)
    assert set(ran) == {"line: data_parallel", "flat: data_parallel"}


def test_one_variant_has_no_rival(timed, tmp_path):
    ran = timed({"line": 1.0}, {})
    found = cfp.plan_fastest(SHAPES[:1], **PRESET, cache_dir=tmp_path)
    assert (times_of(found), found.plan.measured_ms) == ({}, 1.0)
    assert set(ran) == {"data_parallel"}


def test_the_winner_runs_and_computes_what_one_device_does(tmp_path):
    parts = [variant(f"{n} parts", parts=n) for n in (1, 4)]
    found = cfp.plan_fastest(
        parts, **PRESET, donate_argnums=(0,), memory_budget="1GiB", cache_dir=tmp_path
    )
    times = times_of(found)
    assert found.name == min(times, key=times.__getitem__)
    assert is_raced(found)
    assert found.plan.donated == (True, False)
    winner = parts[[one.name for one in parts].index(found.name)]
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=arg.shape).astype(np.float32) for arg in winner.args)
    expected = jax.jit(make_step(1))(w, x)
    differences = cfp.compare(found.plan.apply(winner.fn)(w, x), expected)
    assert differences[0].relative_l2 < 1e-5


def test_without_a_race_predictions_decide(altered, monkeypatch, tmp_path):
    predicted = {"flat": 2.0, "cube": 1.0}
    estimates = {"line": (9.0, True), "flat": (5.0, True), "cube": (6.0, True)}

    def predict(found, number):
        plan = replace(found.plan, predicted_ms=[*predicted.values()][number])
        return replace(found, plan=plan)

    altered(predict, preset="data_parallel")
    estimating(monkeypatch, estimates)
    settings = cfp.PlannerSettings(race=False)
    found = cfp.plan_fastest(SHAPES, cache_dir=tmp_path, settings=settings)
    assert (found.name, is_raced(found)) == ("cube", False)
    assert times_of(found) == {"line": None, **predicted}


def test_under_a_preset_estimates_decide_if_nothing_is_measured(tmp_path):
    def find(measure):
        settings = cfp.PlannerSettings(race=False, measure=measure)
        how = {"cache_dir": tmp_path, "settings": settings}
        return cfp.plan_fastest(SHAPES, preset="data_parallel", **how)

    found = find(None)
    times = times_of(found)
    assert times.keys() == {"line", "flat", "cube"}
    assert times[found.name] == min(times.values()) == found.plan.predicted_ms
    text = "under the preset 'data_parallel' needs a race. Set race=True, or plan"
    with pytest.raises(CfpError, match=f"{text} one alone: line; flat; cube"):
        find(True)


# ----------------------------------------------------- by estimates, in so much time


def estimating(monkeypatch, table, is_final=False):
    """Has variants be estimated as a test says: (milliseconds, whether it fits)."""

    def say(context, analysis):
        time_ms, fits = table[BY_AXES[len(context.mesh.axis_names)]]
        known = whole(context, analysis).profiles if is_final else None
        return Estimate(time_ms=time_ms, fits=fits, profiles=known)

    whole = turns.estimate

    monkeypatch.setattr(turns, "estimate", say)


def told(how):
    """Keywords of planning whose events are kept, and the list of these."""
    said: list[str] = []
    settings = replace(how["settings"], progress=lambda event: said.append(str(event)))
    return said, {**how, "settings": settings}


def small(folder, **more):
    """Settings that plan quickly, without a preset."""
    how = {"per_kind": 1, "in_context": False, "race": False, **more}
    return {"cache_dir": folder, "settings": DetailedSettings(**how)}


@pytest.mark.parametrize(
    ("table", "is_final", "planned"),
    [
        ({"line": (9.0, True), "flat": (5.0, True), "cube": (6.0, True)}, False, "fc"),
        ({"line": (9.0, True), "flat": (5.0, True), "cube": (6.0, True)}, True, "f"),
        (
            {"line": (9.0, True), "flat": (5.0, False), "cube": (6.0, False)},
            False,
            "fl",
        ),
        ({"line": (9.0, False), "flat": (5.0, False), "cube": (6.0, False)}, 0, "fc"),
    ],
)
def test_the_best_two_by_estimates_are_planned(
    table, is_final, planned, monkeypatch, altered, tmp_path
):
    estimating(monkeypatch, table, is_final)
    altered(lambda found, number: found)
    found = cfp.plan_fastest(SHAPES, **small(tmp_path))
    done = [name for name, note in notes(found).items() if not note]
    assert sorted(name[0] for name in done) == sorted(planned)
    assert estimates_of(found) == [9.0, 5.0, 6.0]
    how = "too large, unlike line" if "l" in planned else "behind flat"
    assert {*notes(found).values()} - {""} == {f"{how} by estimate"}
    # The plan says what it was chosen among, and its file does.
    [taken] = [one for one in found.plan.figures.variants if one.taken]
    assert taken.name == found.name
    again = cfp.Plan.from_json(json.loads(found.plan.to_json()))
    assert again.figures.variants == found.plan.figures.variants
    assert f"variant {found.name}: " in " ".join(repr(again).split())


def test_the_plan_says_what_all_variants_took(monkeypatch, altered, tmp_path):
    table = {"line": (9.0, True), "flat": (5.0, True), "cube": (5.0004, True)}
    estimating(monkeypatch, table, is_final=True)
    altered(lambda found, number: found)
    found = cfp.plan_fastest(SHAPES, **small(tmp_path))
    assert notes(found)["line"] == "behind flat by estimate"
    assert notes(found)["cube"] == "as fast as flat by estimate"
    assert found.plan.search["seconds_of_all_variants"] > 0.0


def test_what_was_left_out_is_planned_where_nothing_else_fits(
    monkeypatch, clock, tmp_path
):
    """And the next takes the turn of one that does not fit."""
    table = {"line": (9.0, True), "flat": (5.0, True), "cube": (8.0, True)}
    estimating(monkeypatch, table)
    clock.plans_take(0.0, needing={"flat": 1, "cube": 1})
    found = cfp.plan_fastest(SHAPES, **small(tmp_path))
    assert (found.name, clock.planned) == ("line", ["flat", "cube", "line"])
    assert estimates_of(found) == [9.0, None, None]


def test_what_cannot_be_estimated_is_planned_last(clock, tmp_path):
    """It most likely fails, and takes no time from what does not."""

    def refused(analyzed):
        if len(analyzed.mesh.axis_names) == 2:
            raise CfpError("No rates.")
        return 1.0

    clock.estimates_take(0.0, refused)
    clock.plans_take(0.0, needing={"cube": 1})
    cfp.plan_fastest(SHAPES, **small(tmp_path, seconds=180.0))
    assert clock.planned == ["line", "cube", "flat"]


def test_all_variants_share_one_budget_of_time(clock, tmp_path):
    """One that takes all of it leaves none for the next; what there is is the plan."""
    clock.estimates_take(0.0)
    clock.plans_take(15.0, 100.0, needing={"line": 1})
    found = cfp.plan_fastest(SHAPES, **small(tmp_path, seconds=60.0))
    # A third, since the last race has one; of what is left, too.
    assert clock.given == [20.0, 15.0]
    assert notes(found)["cube"] == "not planned: time was over"
    assert found.plan is not None and not notes(found)[found.name]


def test_no_estimate_is_begun_after_its_time(clock, tmp_path):
    """Variants without one come last, and without time are not planned."""
    clock.estimates_take(21.0)
    clock.plans_take(41.0)
    last = [SHAPES[1], SHAPES[2], SHAPES[0]]
    said, how = told(small(tmp_path, seconds=60.0))
    found = cfp.plan_fastest(last, **how)
    assert (clock.estimated, found.name, clock.now) == (["flat"], "flat", 162.0)
    assert "flat: estimating" in said
    over = "not planned: time was over"
    assert notes(found) == {"flat": "", "cube": over, "line": over}


def test_one_step_is_traced_once_for_all_meshes(tmp_path):
    calls = []

    def step(w, x):
        calls.append(1)
        return w - (jnp.tanh(x @ w) ** 2).sum()

    variants = [replace(one, fn=step) for one in SHAPES]
    assert [one.mesh for one in variants[1:]] != [one.mesh for one in variants[:-1]]
    cfp.plan_fastest(variants, **small(tmp_path))
    assert len(calls) == 1


def test_a_step_that_cannot_be_traced_is_told_once(tmp_path):
    def broken(w, x):
        return x @ w.T @ w.T

    variants = [replace(one, fn=broken) for one in SHAPES]
    with pytest.raises(StepNotTraceable) as caught:
        cfp.plan_fastest(variants, cache_dir=tmp_path)
    assert str(caught.value).count("could not trace") == 1


def peak_of(one, folder):
    return cfp.plan_fastest([one], **PRESET, cache_dir=folder).plan.peak_bytes


def test_where_nothing_fits_leaner_variants_are_planned(tmp_path):
    whole, parts = variant("whole"), variant("parts", parts=8)
    budget = peak_of(parts, tmp_path)
    how = {**PRESET, "memory_budget": budget, "cache_dir": tmp_path}
    made = []

    def leaner():
        made.append(1)
        yield parts

    found = cfp.plan_fastest([whole], leaner=leaner, **how)
    assert (found.name, [*times_of(found)]) == ("parts", ["whole", "parts"])
    assert "is enough for" in notes(found)["whole"]
    # They are made only where nothing else fits.
    how["memory_budget"] = "1GiB"
    assert cfp.plan_fastest([whole], leaner=leaner, **how).name == "whole"
    assert len(made) == 1


def test_the_error_names_what_needs_least_of_all_that_was_tried(tmp_path):
    """Variants that were asked for, and those in more parts."""
    whole, parts = variant("whole"), variant("parts", parts=8)
    peaks = {one.name: peak_of(one, tmp_path) for one in (whole, parts)}
    assert peaks["parts"] < peaks["whole"]
    how = {**PRESET, "cache_dir": tmp_path, "leaner": lambda: [parts]}

    def refused(budget):
        with pytest.raises(MemoryBudgetError) as caught:
            cfp.plan_fastest([whole], memory_budget=budget, **how)
        return caught.value, str(caught.value).splitlines()

    error, (first, second, third, *_) = refused(peaks["parts"] - 1)
    assert error.smallest_feasible_bytes == peaks["parts"]
    assert "is enough for the smallest compiled program; budgets between" in first
    size = format_bytes(peaks["whole"], up=True)
    assert second == f"  Variant parts. Others need as much or more: whole {size}."
    assert third.startswith("  That program shards its segments: ")
    assert third.endswith(" as data_parallel.")
    # What cannot fit by estimate is not compiled.
    error, _ = refused("1B")
    assert error.smallest_feasible_bytes == peaks["whole"]

    # One that cannot be traced lacks no memory.
    def broken(*args):
        raise ValueError("it does not divide")

    how["leaner"] = lambda: [replace(parts, fn=broken)]
    error, _ = refused("1B")
    assert error.smallest_feasible_bytes == peaks["whole"]


def test_without_a_mesh_all_devices_are_planned_for(monkeypatch, tmp_path):
    estimating(monkeypatch, {"line": (2.0, True), "flat": (1.0, True)}, True)
    how = small(tmp_path)
    step = SHAPES[0].fn
    plan = cfp.plan(step, *SHAPES[0].args, **how)
    assert plan.mesh_axes == (("x", 2), ("y", 4))
    assert [one.name for one in plan.figures.variants] == ["x=8", "x=2,y=4"]
    # With a preset it is one axis, and with a mesh that one.
    preset = cfp.plan(step, *SHAPES[0].args, **PRESET | how)
    assert preset.mesh_axes == (("x", 8),)
    given = cfp.plan(step, *SHAPES[0].args, mesh=SHAPES[0].mesh, **how)
    assert given.mesh_axes == (("x", 8),)
    assert given.figures.variants == ()


def test_parallelize_needs_no_mesh(monkeypatch, tmp_path):
    estimating(monkeypatch, {"line": (2.0, True), "flat": (1.0, True)}, True)
    w, x = (np.ones(arg.shape, np.float32) for arg in SHAPES[0].args)
    step = cfp.parallelize(SHAPES[0].fn, quiet=True, **small(tmp_path))
    differences = cfp.compare(step(w, x), jax.jit(SHAPES[0].fn)(w, x))
    assert differences[0].relative_l2 < 1e-5
    assert step.plan.mesh_axes == (("x", 2), ("y", 4))


# ------------------------------------------------------------------------ what is out


def test_what_crashes_in_the_last_race_is_out(timed, tmp_path, monkeypatch):
    times = {"line": 1.0, "flat": 2.0, "cube": 3.0}
    timed(times, times)
    healthy = racing.run

    def run(built, job, *place, timing):
        if job.label == "line: data_parallel":
            return built.record("crashed", reason="boom")
        return healthy(built, job, *place, timing=timing)

    monkeypatch.setattr(racing, "run", run)
    found = cfp.plan_fastest(SHAPES, **PRESET, cache_dir=tmp_path)
    assert found.name == "flat"
    assert times_of(found) == {**times, "line": None}
    assert notes(found)["line"] == "crashed: boom"


def test_the_last_race_runs_what_is_for_other_devices_on_those(tmp_path):
    """The second one's own race is answered by the first one's."""
    both = [variant("one", (2,)), variant("two", (2,))]
    apart = jax.make_mesh((2,), ("x",), devices=jax.devices()[2:4])
    both[1] = replace(both[1], mesh=apart)
    found = cfp.plan_fastest(both, **PRESET, cache_dir=tmp_path)
    assert is_raced(found)
    assert None not in times_of(found).values()


def test_where_all_fail_each_says_why(tmp_path):
    pins = {"w": jax.P("z"), "x": jax.P("y")}
    with pytest.raises(CfpError, match=r"^(?!None of)"):
        cfp.plan_fastest(SHAPES[:1], **PRESET, pins=pins, cache_dir=tmp_path)
    with pytest.raises(CfpError, match="None of the variants") as caught:
        cfp.plan_fastest(SHAPES[:2], **PRESET, pins=pins, cache_dir=tmp_path)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "line",
        "flat",
    ]


def test_variants_need_names_of_their_own(tmp_path):
    for wrong in ([], [SHAPES[0], SHAPES[0]]):
        with pytest.raises(CfpError, match="a name of its own"):
            cfp.plan_fastest(wrong, cache_dir=tmp_path)


# ---------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("count", range(2, 49))
def test_mesh_shapes_are_all_ways_to_share_devices(count):
    found = mesh_shapes(count)
    sizes = [tuple(size for _, size in axes) for axes in found]
    expected = {
        tuple(sorted(size for size in (a, b, c) if size > 1))
        for a in range(1, count + 1)
        for b in range(1, count + 1)
        for c in (count // a // b,)
        if a * b * c == count
    }
    assert sorted(sizes) == sorted(expected)
    assert sizes[0] == (count,)
    assert {tuple(name for name, _ in axes) for axes in found} <= {
        ("x",),
        ("x", "y"),
        ("x", "y", "z"),
    }
