"""Search-guided profiling, with devices that are made up: against all there is."""

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfp.analysis.layout import Storage
from cfp.errors import DeviceError
from cfp.models import registry
from cfp.presets.classics import presets
from cfp.profiling.record import ProfileRecord
from cfp.search.bounds import fit_weights
from cfp.search.candidates import best_candidates
from cfp.search.costs import Costs, build_problem, measured_options
from cfp.search.dynamic import solve_dynamically
from cfp.search.effort import Effort
from cfp.search.guided import explore
from cfp.search.ilp import smallest_budget, solve_ilp
from cfp.search.problem import Candidate, Option
from cfp.search.shortlist import leading_classics
from cfp.search.wanted import WantedMaker
from cfp_test.models.tiny import TINY
from cfp_test.programs.registry import PROGRAMS
from cfp_test.search.test_estimate import estimated, rates_of

SIZES = (("x", 4),)
# What parts of an estimate count on the made-up devices: contractions in full, other
# ops half, since they fuse, and moves mostly, since some hide behind contractions.
TRUTH = np.array([1.0, 0.5, 0.8])


@pytest.fixture(scope="module")
def model():
    """Large enough that moves are not all latency; nothing of it is ever built."""
    sizes = {"hidden": 2048, "heads": 16, "seq": 512, "vocab": 8192, "batch": 16}
    return estimated(*registry.build("gpt", **{**TINY["gpt"], **sizes}), SIZES)


@pytest.fixture(scope="module")
def small():
    """A program whose whole space can be looked at."""
    return estimated(*PROGRAMS["mlp"]()[:2], SIZES)


class Devices(WantedMaker):
    """Makes candidates into jobs, and knows what they would take.

    Args:
        noise: how much longer than by the truth things take at most, as a share.
        broken: says of what a candidate cannot be run.
    """

    def __init__(self, analysis, estimates, noise=0.0, broken=lambda _: False):
        classics = leading_classics(analysis, estimates, presets(analysis.frame))
        super().__init__(analysis, classics, estimates, (), in_context=False)
        self.analysis = analysis
        self.estimates = estimates
        self.costs = Costs(analysis, rates_of(SIZES))
        self.noise = noise
        self.broken = broken
        self.status = "crashed"
        self.runs = 0
        self._of = {}

    def make(self, kind, candidate):
        made = super().make(kind, candidate)
        self._of[made.job.key.digest] = kind, candidate
        return made

    def again(self, base, alone=False):
        made = super().again(base, alone)
        self._of[made.job.key.digest] = base.kind, made.candidate
        return made

    def time_ms(self, kind, candidate):
        parts = self.estimates.kinds[kind].parts(candidate)
        # Two candidates may be one program: what they are made of is the same.
        luck = hashlib.sha256(repr((kind, *parts)).encode()).digest()[0] / 255
        again = 1.3 if candidate.remat else 1.0
        return float(parts @ TRUTH) * (1 + self.noise * luck) * again

    def look(self, jobs):
        self.runs += len(jobs)
        return {job.key.digest: self._record(job) for job in jobs}

    def _record(self, job):
        kind, candidate = self._of[job.key.digest]
        if self.broken(candidate):
            return ProfileRecord(
                key=job.key.digest, parts=(), status=self.status, reason="broken"
            )
        return ProfileRecord(
            key=job.key.digest,
            parts=(),
            status="ok",
            samples_ms=(self.time_ms(kind, candidate),),
            temp_bytes=self._needed_bytes(kind, candidate),
        )

    def _needed_bytes(self, kind, candidate):
        """While it runs, whether it was kept or is computed again."""
        plain = replace(candidate, remat=False)
        return self.costs.least_bytes(kind, plain).residual_bytes

    def explore(self, budget_bytes=None, **effort):
        return explore(
            self.estimates,
            self,
            self.costs,
            effort=Effort(**{"per_kind": 100, **effort}),
            budget_bytes=budget_bytes,
            look=self.look,
        )

    def best(self, found, budget_bytes=None):
        """The best plan of what was measured."""
        options = measured_options(self.costs, found.wanted, found.records)
        return solve_ilp(build_problem(self.costs, options, budget_bytes))

    def everything(self, budget_bytes=None, remat=(False,)):
        """The problem over the whole space, for programs whose space is small."""
        options = []
        for kind, estimate in enumerate(self.estimates.kinds):
            every = itertools.product(*estimate.strategies)
            options.append(
                [
                    self._option(kind, Candidate(picks, mode, remat=again))
                    for picks in every
                    for mode in Storage
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


def test_the_best_of_the_whole_space_is_found(model):
    """With the truth known, a wide beam looks at the whole space."""
    analysis, estimates = model
    devices = Devices(analysis, estimates)
    found = devices.explore()
    assert found.gap <= 0.01
    times = {}
    for kind, estimate in enumerate(estimates.kinds):
        true = estimate.weighed(TRUTH)
        every = [best_candidates(true, mode, 1, beam_width=4096)[0] for mode in Storage]
        times[kind] = min(c.estimate_ms for c in every)
        mine = [w.candidate for w in found.wanted if w.kind == kind]
        best = min(devices.time_ms(kind, c) for c in mine)
        assert best <= times[kind] * 1.01 + 1e-9
    space = [3 * np.prod([len(s) for s in e.strategies]) for e in estimates.kinds]
    assert devices.runs < sum(space) / 5


def test_with_luck_too_what_is_found_is_what_all_there_is_gives(small):
    analysis, estimates = small
    devices = Devices(analysis, estimates, noise=0.05)
    found = devices.explore()
    everything = solve_dynamically(devices.everything())
    best = devices.best(found)
    assert best.cost_ms <= everything.cost_ms * 1.011
    # The gap is a promise about everything.
    assert everything.cost_ms >= best.cost_ms * (1 - found.gap) - 1e-9
    assert devices.runs < sum(map(len, devices.everything().options)) / 2


def test_patience_ends_it_after_rounds_that_made_nothing_faster(model):
    analysis, estimates = model
    best, rounds = [], []
    for patience in (0, 1, 2, float("inf")):
        devices = Devices(analysis, estimates, noise=0.05)
        found = devices.explore(patience=patience)
        best.append(devices.best(found).cost_ms)
        rounds.append(found.rounds)
        required = replace(found, wanted=found.wanted[: found.required])
        first = devices.best(required).cost_ms
        if patience < float("inf") and found.gap > 0.01:
            # All rounds but the last ones made the plan faster.
            assert best[-1] <= first * 0.99 ** (found.rounds - patience) + 1e-9
    assert rounds == sorted(rounds) and rounds[0] < rounds[-1]
    assert best == sorted(best, reverse=True)


def test_without_patience_rounds_begin_where_something_faster_will_fit(small):
    analysis, estimates = small
    devices = Devices(analysis, estimates)
    found = devices.explore(patience=0)
    assert found.rounds == 0
    fastest = devices.best(found)
    every = devices.everything(remat=(False, True))
    least = smallest_budget(every)
    began = []
    for share in (0.02, 0.5, 0.8, 1.0):
        budget = int(least + share * (fastest.memory_bytes - least))
        found = devices.explore(budget, patience=0)
        first = replace(found, wanted=found.wanted[: found.required])
        best = devices.best(first, budget)
        true = solve_dynamically(replace(every, budget_bytes=budget))
        begins = best is None or best.cost_ms > 1.02 * true.cost_ms
        assert (found.rounds > 0) == begins
        assert devices.best(found, budget).cost_ms <= 1.02 * true.cost_ms
        began.append(begins)
    assert True in began and False in began


def test_memory_is_searched_too(small):
    """Between the least that anything needs and what the fastest plan needs."""
    analysis, estimates = small
    devices = Devices(analysis, estimates)
    every = devices.everything(remat=(False, True))
    least = smallest_budget(every)
    most = solve_dynamically(every).memory_bytes
    assert least < most
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = int(least + share * (most - least))
        devices = Devices(analysis, estimates)
        found = devices.explore(budget_bytes=budget)
        assert found.tight
        best = devices.best(found, budget)
        true = solve_dynamically(devices.everything(budget, remat=(False, True)))
        assert best is not None and best.memory_bytes <= budget
        assert best.cost_ms <= true.cost_ms * 1.011
        assert found.gap <= 0.01


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_the_gap_holds_where_memory_is_tight(small, noise):
    """What is slower may need less memory: it is looked at, too."""
    analysis, estimates = small
    every = Devices(analysis, estimates, noise=noise).everything(remat=(False, True))
    least = smallest_budget(every)
    for share in (1.0, 1.02, 1.2):
        budget = int(least * share)
        devices = Devices(analysis, estimates, noise=noise)
        found = devices.explore(budget_bytes=budget)
        true = solve_dynamically(devices.everything(budget, remat=(False, True)))
        best = devices.best(found, budget)
        assert best.cost_ms * (1 - found.gap) <= true.cost_ms * (1 + 1e-9)


def test_what_runs_only_if_computed_again_is_found(small):
    """Segments that alone run out of memory."""
    analysis, estimates = small
    every = Devices(analysis, estimates).everything(remat=(False, True))
    budget = int(1.1 * smallest_budget(every))
    devices = Devices(analysis, estimates, broken=lambda c: broken(c))
    devices.status = "out_of_memory"
    allowed = []

    def broken(candidate):
        if not allowed:
            allowed.append(candidate.key)  # Without any there is nothing to go on from.
        return not candidate.remat and candidate.key not in allowed

    found = devices.explore(budget_bytes=budget)
    again = [w for w in found.wanted if w.candidate.remat]
    assert again
    assert all(np.isfinite(w.time_ms(found.records)) for w in again)
    best = devices.best(found, budget)
    assert best is None or np.isfinite(best.cost_ms)


@pytest.mark.parametrize("name", ["scalars", "no_outputs_needed"])
def test_where_nothing_can_be_chosen_nothing_is_left_open(name):
    analysis, estimates = estimated(*PROGRAMS[name]()[:2], SIZES)
    assert Devices(analysis, estimates).explore().gap == 0.0


def test_no_more_is_measured_than_allowed(model):
    analysis, estimates = model
    few = Devices(analysis, estimates, noise=5.0).explore(per_kind=1)
    assert len(few.wanted) == few.required and few.rounds == 0
    some = Devices(analysis, estimates, noise=5.0).explore(per_kind=9)
    for kind in range(len(estimates.kinds)):
        mine = [w for w in some.wanted if w.kind == kind]
        first = [w for w in some.wanted[: some.required] if w.kind == kind]
        assert len(mine) <= max(9, len(first))
    assert 0.0 <= some.gap <= few.gap <= 1.0


def test_the_same_records_ask_for_the_same_things(model):
    """So that what is stored answers all of a second run."""
    analysis, estimates = model
    first, second = (
        [
            (w.kind, w.candidate.key)
            for w in Devices(analysis, estimates, noise=5.0).explore(per_kind=16).wanted
        ]
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == len(first)


def test_what_is_not_known_ends_the_search(model):
    analysis, estimates = model
    whole = Devices(analysis, estimates, noise=1.0).explore(per_kind=16)
    assert whole.rounds > 0
    devices = Devices(analysis, estimates, noise=1.0)
    known = {w.job.key.digest for w in whole.wanted[: whole.required]}

    def stored_only(jobs):
        found = Devices.look(devices, jobs)
        return {key: found[key] for key in found.keys() & known}

    devices.look = stored_only
    found = devices.explore()
    assert found.rounds == 1
    assert found.records.keys() == known
    assert found.gap > 0.0


def test_what_fails_is_not_asked_for_again(model):
    analysis, estimates = model
    devices = Devices(
        analysis, estimates, broken=lambda c: c.storage is Storage.SHARDED
    )
    found = devices.explore()
    assert devices.runs == len(found.wanted)
    assert devices.best(found) is not None
    nothing = Devices(analysis, estimates, broken=lambda _: True)
    with pytest.raises(DeviceError, match="broken"):
        nothing.explore()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            *[st.just(0.0) | st.floats(0.01, 100.0)] * 3,
            st.floats(0.01, 200.0),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_weighed_parts_bound_all_that_was_measured(rows):
    found = np.array(rows)
    parts, times = found[:, :3], found[:, 3]
    weights = fit_weights(parts, times)
    assert np.all(weights >= 0) and np.all(weights <= 1)
    assert np.all(parts @ weights <= times * (1 + 1e-6) + 1e-6)
    # No single weight could be larger.
    for i in range(3):
        more = weights.copy()
        more[i] += 1e-3
        beyond = np.any(parts @ more > times) or more[i] > 1
        assert beyond or not parts[:, i].any()


class Neighbours(Devices):
    """The same, where segments are measured beside a neighbour, too."""

    def __init__(self, *given, **how):
        super().__init__(*given, **how)
        self._in_context = True
        self._pairs = {}

    def make(self, kind, candidate):
        made = super().make(kind, candidate)
        if made.pair_job:
            near, carrier = made.carrier
            other = self.analysis.segments[near].kind
            self._of[made.carrier_job.key.digest] = other, carrier
            self._pairs[made.pair_job.key.digest] = (kind, candidate), (other, carrier)
        return made

    def again(self, base, alone=False):
        made = WantedMaker.again(self, base, alone)
        if made.pair_job:
            near, carrier = made.carrier
            both = (
                (made.kind, made.candidate),
                (self.analysis.segments[near].kind, carrier),
            )
            self._pairs[made.pair_job.key.digest] = both
        else:
            self._of[made.job.key.digest] = made.kind, made.candidate
        return made

    def _record(self, job):
        if job.key.digest not in self._pairs:
            return super()._record(job)
        pair = self._pairs[job.key.digest]
        works = not any(self.broken(candidate) for _, candidate in pair)
        return ProfileRecord(
            key=job.key.digest,
            parts=(),
            status="ok" if works else self.status,
            samples_ms=(sum(self.time_ms(*one) for one in pair),) if works else (),
            temp_bytes=sum(self._needed_bytes(*one) for one in pair),
        )


def test_beside_its_neighbour_what_failed_is_measured_alone_computed_again(model):
    """What takes too much memory without, be it by itself or together with another."""
    analysis, estimates = model

    def is_too_large(candidate):
        return candidate.storage is Storage.SHARDED and not candidate.remat

    free = Neighbours(analysis, estimates)
    fastest = free.best(free.explore(patience=0))
    budget = int(0.9 * fastest.memory_bytes)
    devices = Neighbours(analysis, estimates, broken=is_too_large)
    devices.status = "out_of_memory"
    found = devices.explore(budget)
    again = [w for w in found.wanted if w.candidate.remat]
    alone = [w for w in again if w.pair_job is None]
    assert alone and any(w.shares_job for w in again)
    for item in again:
        failed = item.base.has_failed(found.records)
        # What was asked for before that was known has failed, too.
        assert item.shares_job != failed or item.failure(found.records)
    asked = [(w.kind, w.candidate.key, w.pair_job is None) for w in found.wanted]
    assert len(set(asked)) == len(asked)
    assert devices.best(found, budget) is not None


def test_where_nothing_can_fit_the_leanest_is_computed_again(model):
    """An error then names how little memory would do, as far as that is known."""
    devices = Devices(*model)
    found = devices.explore(1)
    again = [w for w in found.wanted if w.candidate.remat]
    assert {w.kind for w in again} == set(range(len(devices.estimates.kinds)))
    assert len(found.wanted) == found.required + len(again), "nothing else is"
