"""Search-guided profiling, with devices that are made up: against all there is."""

import hashlib
import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from cfp import models
from cfp.analysis.layout import Storage
from cfp.analysis.presets import presets
from cfp.analysis.storage import USUAL_STORAGE
from cfp.cost.costs import Costs, SegmentChoice
from cfp.errors import CfpError
from cfp.profiling.record import ProfileRecord
from cfp.search.choices import (
    leading_presets,
    preset_parts,
    preset_times,
    ranked_candidates,
)
from cfp.search.guided import _by_preset, build_problem, measure_candidates
from cfp.search.requests import (
    RequestBuilder,
    measured_options,
    rematerialize,
)
from cfp.search.solver import Option, leanest, solve
from cfp.settings import Replacing
from cfp_test.models.tiny import TINY
from cfp_test.programs.registry import PROGRAMS
from cfp_test.search.ilp import solve_ilp
from cfp_test.search.made_up import estimated, rates_of
from cfp_test.support.covering import at_night

ON_ONE_HOST = [mode for mode in USUAL_STORAGE if mode is not Storage.INNER]

SIZES = (("x", 4),)
# Of an estimate, on the made-up devices: ops fuse, and some moves hide behind others.
TRUTH = 0.8


@pytest.fixture(scope="module")
def model():
    """Large enough that moves are not all latency; nothing of it is ever built."""
    sizes = {"hidden": 2048, "heads": 16, "seq": 512, "vocab": 8192, "batch": 16}
    made = models.build("gpt", **{**TINY["gpt"], **sizes})
    return estimated(*made, SIZES, donate_argnums=0)


@pytest.fixture(scope="module")
def small():
    """A program whose whole space can be looked at."""
    return estimated(*PROGRAMS["mlp"]()[:2], SIZES)


@dataclass(frozen=True)
class Watched(RequestBuilder):
    """Knows what its jobs measure: kinds and candidates, by digest."""

    measures: dict = field(default_factory=dict)

    def make(self, kind, candidate, number):
        made = super().make(kind, candidate, number)
        self._remember(made)
        failed = ProfileRecord(key="", parts=(), status="crashed")
        if self.costs.can_rematerialize(kind):
            for records in ({}, {made.jobs[0].key.digest: failed}):
                where = (self.costs.analysis, self.environment)
                self._remember(rematerialize(*where, made, "again", records))
        return made

    def _remember(self, item):
        mine, first = (item.kind, item.candidate), item.jobs[0]
        if item.neighbour:
            near, candidate = item.neighbour
            other = self.costs.analysis.segments[near].kind, candidate
            self.measures[item.jobs[1].key.digest] = [other]
            self.measures[item.jobs[2].key.digest] = [mine, other]
        if not (item.neighbour and item.base):
            self.measures[first.key.digest] = [mine]


class Devices:
    """Know what candidates would take.

    Args:
        noise: how much longer than by the truth things take at most, as a share.
        broken: says of what a candidate cannot be run.
        status: of what cannot.
        in_context: whether segments are measured with a neighbour, too.
    """

    def __init__(
        self,
        analysis,
        estimates,
        noise=0.0,
        broken=lambda _: False,
        status="crashed",
        in_context=False,
    ):
        presets_ = leading_presets(analysis, estimates, presets(analysis.frame))
        self.costs = Costs(analysis, rates_of(SIZES))
        self.maker = Watched(self.costs, presets_, estimates, (), in_context)
        self.estimates = estimates
        self.noise = noise
        self.broken = broken
        self.status = status
        self.runs = 0

    def time_ms(self, kind, candidate):
        estimate_ms = self.estimates[kind].total_ms(candidate)
        # Two candidates may be one program: what they are estimated at is the same.
        name = f"{kind} {estimate_ms:.9g}"
        luck = hashlib.sha256(name.encode()).digest()[0] / 255
        again = 1.3 if candidate.remat else 1.0
        return TRUTH * estimate_ms * (1 + self.noise * luck) * again

    has_end, is_over = False, False

    def __call__(self, jobs, ignore_end=False):
        return self.look(jobs)

    def look_up(self, jobs):
        return {}

    def look(self, jobs):
        self.runs += len(jobs)
        return {job.key.digest: self._record(job) for job in jobs}

    def _record(self, job):
        measured = self.maker.measures[job.key.digest]
        works = not any(self.broken(candidate) for _, candidate in measured)
        return ProfileRecord(
            key=job.key.digest,
            parts=(),
            status="ok" if works else self.status,
            reason="" if works else "broken",
            samples_ms=(sum(self.time_ms(*one) for one in measured),) if works else (),
            temp_bytes=sum(self._needed_bytes(*one) for one in measured),
        )

    def _needed_bytes(self, kind, candidate):
        """While it runs, whether it was kept or is rematerialized."""
        plain = replace(candidate, remat=False)
        return self.costs.least_bytes(kind, plain).residual_bytes

    def measure_candidates(self, budget_bytes=None, per_kind=100, **options):
        return measure_candidates(
            self.maker,
            per_kind=per_kind,
            budget_bytes=budget_bytes,
            measurer=self,
            **options,
        )

    def best(self, found, budget_bytes=None):
        """The best plan of what was measured."""
        options = measured_options(self.costs, found.requests, found.records)
        return solve_ilp(build_problem(self.costs, options, budget_bytes))

    def everything(self, budget_bytes=None, remat=(False,)):
        """The problem over the whole space, for programs whose space is small."""
        options = []
        for kind, estimate in enumerate(self.estimates):
            every = itertools.product(*estimate.strategies)
            options.append(
                [
                    self._option(kind, SegmentChoice(picks, mode, remat=again))
                    for picks in every
                    for mode in ON_ONE_HOST
                    for again in remat
                ]
            )
        return build_problem(self.costs, options, budget_bytes)

    def _option(self, kind, candidate):
        least = self.costs.least_bytes(kind, candidate)
        return Option(
            candidate=candidate,
            time_ms=self.time_ms(kind, candidate),
            state_bytes=least.state_bytes,
            residual_bytes=least.residual_bytes,
            temp_bytes=self._needed_bytes(kind, candidate) - least.residual_bytes,
        )


def test_where_memory_is_plenty_the_best_by_estimate_is_measured_and_no_more(
    model, monkeypatch
):
    """With the truth known, a wide beam looks at the whole space."""
    analysis, estimates = model
    devices = Devices(analysis, estimates)
    found = devices.measure_candidates()
    assert len(found.rounds) == 1 and not found.memory_bound
    monkeypatch.setattr("cfp.search.choices.BEAM_WIDTH", 4096)
    for kind, estimate in enumerate(estimates):
        every = ranked_candidates(estimate, 1)
        assert {c.storage for c in every} == {*ON_ONE_HOST}
        mine = [w.candidate for w in found.requests if w.kind == kind]
        best = min(devices.time_ms(kind, c) for c in mine)
        assert best <= TRUTH * min(c.estimate_ms for c in every) * 1.01 + 1e-9
    space = [3 * np.prod([len(s) for s in e.strategies]) for e in estimates]
    assert devices.runs < sum(space) / 5


def test_with_luck_too_what_is_found_is_near_what_all_there_is_gives(small):
    analysis, estimates = small
    devices = Devices(analysis, estimates, noise=0.05)
    best = devices.best(devices.measure_candidates())
    everything = solve(devices.everything())
    assert best.cost_ms <= everything.cost_ms * 1.05
    assert devices.runs < sum(map(len, devices.everything().options)) / 2


def test_rounds_begin_where_something_faster_will_fit():
    analysis, estimates = estimated(*PROGRAMS["donated"]()[:2], SIZES)
    devices = Devices(analysis, estimates)
    found = devices.measure_candidates()
    assert len(found.rounds) == 1
    fastest = devices.best(found)
    every = devices.everything(remat=(False, True))
    least = leanest(every).memory_bytes
    began = []
    for share in (0.02, 0.5, 0.8, 1.0):
        budget = int(least + share * (fastest.memory_bytes - least))
        found = devices.measure_candidates(budget)
        first = replace(found, rounds=found.rounds[:1])
        best = devices.best(first, budget)
        true = solve(replace(every, budget_bytes=budget))
        begins = best is None or best.cost_ms > 1.02 * true.cost_ms
        assert (len(found.rounds) > 1) == begins
        assert devices.best(found, budget).cost_ms <= 1.02 * true.cost_ms
        began.append(begins)
    assert True in began and False in began


def test_memory_is_searched_too(small):
    """Between the least that anything needs and what the fastest plan needs."""
    analysis, estimates = small
    devices = Devices(analysis, estimates)
    every = devices.everything(remat=(False, True))
    least = leanest(every).memory_bytes
    most = solve(every).memory_bytes
    assert least < most
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = int(least + share * (most - least))
        devices = Devices(analysis, estimates)
        found = devices.measure_candidates(budget_bytes=budget)
        assert found.memory_bound
        best = devices.best(found, budget)
        true = solve(devices.everything(budget, remat=(False, True)))
        assert best is not None and best.memory_bytes <= budget
        assert best.cost_ms <= true.cost_ms * 1.021


def test_what_runs_only_if_computed_again_is_found(small):
    """Segments that alone run out of memory."""
    analysis, estimates = small
    every = Devices(analysis, estimates).everything(remat=(False, True))
    budget = int(1.1 * leanest(every).memory_bytes)
    devices = Devices(
        analysis, estimates, broken=lambda c: broken(c), status="out_of_memory"
    )
    allowed = []

    def broken(candidate):
        if not allowed:
            allowed.append(candidate)  # Without any there is nothing to go on from.
        return not candidate.remat and candidate not in allowed

    found = devices.measure_candidates(budget_bytes=budget)
    again = [w for w in found.requests if w.candidate.remat]
    assert again
    assert all(np.isfinite(w.time_ms(found.records)) for w in again)
    best = devices.best(found, budget)
    assert best is None or np.isfinite(best.cost_ms)


@pytest.mark.parametrize("name", ["scalars", "no_outputs_needed"])
def test_where_nothing_can_be_chosen_nothing_is_asked_for(name):
    analysis, estimates = estimated(*PROGRAMS[name]()[:2], SIZES)
    assert len(Devices(analysis, estimates).measure_candidates().rounds) == 1


@pytest.fixture(scope="module")
def little(model):
    """A budget that keeps out what is fastest."""
    devices = Devices(*model)
    found = devices.measure_candidates()
    return int(0.5 * devices.best(found).memory_bytes)


def test_no_more_is_measured_than_allowed(model, little):
    analysis, estimates = model
    some = Devices(analysis, estimates, noise=1.0).measure_candidates(
        little, per_kind=9
    )
    assert len(some.rounds) > 1
    for kind in range(len(estimates)):
        mine = [w for w in some.requests if w.kind == kind]
        first = [w for w in some.rounds[0] if w.kind == kind]
        for again in (False, True):
            asked = sum(w.candidate.remat is again for w in mine)
            assert asked <= max(9, len(first))


def test_the_same_records_ask_for_the_same_things(model, little):
    """So that what is stored answers all of a second run."""
    analysis, estimates = model
    first, second = (
        [
            (w.kind, w.candidate)
            for w in Devices(analysis, estimates, noise=1.0)
            .measure_candidates(little)
            .requests
        ]
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == len(first)


def test_what_fails_is_not_asked_for_again(model):
    analysis, estimates = model
    devices = Devices(
        analysis, estimates, broken=lambda c: c.storage is Storage.SHARDED
    )
    found = devices.measure_candidates()
    assert devices.runs == len(found.requests)
    assert devices.best(found) is not None
    nothing = Devices(analysis, estimates, broken=lambda _: True)
    with pytest.raises(CfpError, match="broken"):
        nothing.measure_candidates()


@pytest.mark.parametrize("broken", [Storage.USED, *at_night([None, Storage.SHARDED])])
def test_without_time_of_each_kind_one_is_measured(model, broken):
    """The first that runs, whatever time that takes: a plan takes one of each.

    Those of the best preset come first.
    """
    analysis, estimates = model

    class Late(Devices):
        has_end, is_over = True, True

        def __call__(self, jobs, ignore_end=False):
            return self.look(jobs) if ignore_end else {}

    def is_broken(candidate):
        return candidate.storage is broken

    devices = Late(analysis, estimates, broken=is_broken)
    hurried = devices.measure_candidates()
    groups = _by_preset(devices.maker, hurried.requests)
    asked = [w for group in groups for w in group]
    # State that is stored as it is used may be one job under two names.
    ran = [w for w in asked[::-1] if w.is_measured(hurried.records)]
    good = {w.own_job.key.digest: w for w in ran}.values()
    assert sorted(w.kind for w in good) == [*range(len(estimates))]
    for one in good:
        before = [w for w in asked[: asked.index(one)] if w.kind == one.kind]
        assert all(w.has_failed(hurried.records) for w in before)
    assert devices.runs == len(hurried.records)
    assert devices.best(hurried) is not None
    # With time left the rest follows, and nothing is looked up in vain.
    in_time, endless = (
        Devices(analysis, estimates, broken=is_broken) for _ in range(2)
    )
    in_time.has_end = True
    assert (
        in_time.measure_candidates().records.keys()
        == endless.measure_candidates().records.keys()
    )


class Timed(Devices):
    """Measure one job a second, until an end; nothing that would be late is expected.

    Attributes:
        asked: jobs of each call that measured something.
    """

    has_end = True

    def __init__(self, *where, end, **how):
        super().__init__(*where, **how)
        self.end, self.known, self.asked = end, {}, []

    @property
    def is_over(self):
        return len(self.known) > self.end

    def new(self, jobs):
        return {j.key.digest: j for j in jobs if j.key.digest not in self.known}

    def look_up(self, jobs):
        digests = {job.key.digest for job in jobs}
        return {d: r for d, r in self.known.items() if d in digests}

    def __call__(self, jobs, ignore_end=False):
        new = [*self.new(jobs).values()]
        if not ignore_end:
            new = new[: max(0, self.end - len(self.known))]
        self.known |= self.look(new)
        self.asked += [len(new)] if new else []
        return self.look_up(jobs)


def test_with_little_time_the_best_presets_are_measured_first(model):
    """One after another."""
    analysis, estimates = model
    endless = Devices(analysis, estimates, in_context=True).measure_candidates()
    maker = Devices(analysis, estimates, in_context=True).maker
    groups = _by_preset(maker, endless.requests)
    times_ms = preset_times(analysis, estimates, maker.presets)
    best = maker.presets[min(times_ms, key=times_ms.__getitem__)]
    parts = preset_parts(analysis, [best])
    assert [w.candidate in parts[w.kind] for w in groups[0]] == [True] * len(groups[0])
    assert sum(map(len, groups)) == len(endless.requests)
    jobs = [{j.key.digest for w in g for j in w.jobs} for g in groups]
    needed = [len(set().union(*jobs[: n + 1])) for n in range(len(groups))]
    assert needed[0] < needed[1] < needed[-1]
    for end, done in ((needed[0], 1), (needed[1], 2)):
        devices = Timed(analysis, estimates, in_context=True, end=end)
        found = devices.measure_candidates()
        assert len(found.records) == needed[done - 1] <= end
        measured = {w.own_job.key.digest for g in groups[:done] for w in g}
        unmeasured = [w for w in found.requests if w.outcome(found.records) is None]
        late = {w.own_job.key.digest for w in unmeasured}
        assert measured | late == {w.own_job.key.digest for w in found.requests}
        assert not measured & late
        # All that was asked for, with time or without, is in one round.
        assert [*map(len, found.rounds)] == [len(endless.requests)]


def test_where_nothing_can_fit_the_leanest_is_computed_again(model):
    """An error then names how little memory would do, as far as that is known."""
    devices = Devices(*model)
    found = devices.measure_candidates(1)
    again = [w for w in found.requests if w.candidate.remat]
    assert {w.kind for w in again} == set(range(len(devices.estimates)))
    assert len(found.requests) == len(found.rounds[0]) + len(again), "nothing else is"


class WithKernels(Devices):
    """Attention in chunks takes so much less, or more, than as it is written."""

    def __init__(self, analysis, estimates, gain_ms, **options):
        super().__init__(analysis, estimates, **options)
        self.maker = replace(self.maker, replacing=Replacing(kernels=("chunked",)))
        self.gain_ms = gain_ms

    def time_ms(self, kind, candidate):
        gain_ms = self.gain_ms if candidate.kernels else 0.0
        return super().time_ms(kind, candidate) + max(0.0, self.gain_ms) - gain_ms

    def asked(self, found):
        """Candidates that kernels could change, as written and with kernels."""
        mine = [(w.kind, w.candidate) for w in found.requests]
        replaced = {(kind, c.as_written) for kind, c in mine if c.kernels}
        return replaced, {one for one in mine if one in replaced}

    def options(self, found):
        return measured_options(self.costs, found.requests, found.records)


@pytest.mark.parametrize("gain_ms", [0.1, *at_night([0.0])])
def test_where_kernels_are_no_slower_one_strategy_is_measured_as_written(
    model, gain_ms, monkeypatch
):
    """The others cost as much more: plans and gains are as with all measured."""
    devices = WithKernels(*model, gain_ms)
    found = devices.measure_candidates(others=3)
    replaced, written = devices.asked(found)
    assert len(replaced) > 3 and len(written) == 1
    every = WithKernels(*model, gain_ms)
    monkeypatch.setattr("cfp.search.guided._written_twice", lambda *_: [])
    both = every.measure_candidates(others=3)
    assert every.asked(both)[1] == replaced
    assert devices.runs == every.runs - len(replaced) + 1
    times = [
        [{o.candidate: o.time_ms for o in options} for options in made]
        for made in (devices.options(found), every.options(both))
    ]
    for mine, theirs in zip(*times, strict=True):
        assert mine == {one: pytest.approx(ms) for one, ms in theirs.items()}
    assert devices.best(found).cost_ms == pytest.approx(every.best(both).cost_ms)


def test_where_kernels_are_slower_all_is_measured_as_it_is_written(model):
    devices = WithKernels(*model, -1.0)
    found = devices.measure_candidates(others=3)
    replaced, written = devices.asked(found)
    assert written == replaced and len(found.rounds) == 1


def test_what_runs_with_no_kernel_is_measured_as_it_is_written(model):
    def is_broken(candidate):
        return bool(candidate.kernels) and candidate.storage is Storage.SHARDED

    devices = WithKernels(*model, 0.1, broken=is_broken)
    found = devices.measure_candidates(others=3)
    replaced, written = devices.asked(found)
    sharded = {one for one in replaced if one[1].storage is Storage.SHARDED}
    assert sharded and written >= sharded and written < replaced
    # Nothing is taken for measured of which nothing is known.
    known = [{o.candidate for o in options} for options in devices.options(found)]
    assert all(candidate in known[kind] for kind, candidate in replaced)
