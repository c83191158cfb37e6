"""Search-guided profiling, with devices that are made up: against all there is."""

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest

from cfp.analysis.layout import Storage
from cfp.cost.choice import SegmentChoice
from cfp.cost.costs import Costs
from cfp.errors import DeviceError
from cfp.models import registry
from cfp.presets.classics import presets
from cfp.profiling.record import ProfileRecord
from cfp.search.build import build_problem
from cfp.search.choices import best_candidates, leading_classics
from cfp.search.dynamic import smallest_budget, solve_dynamically
from cfp.search.guided import explore
from cfp.search.problem import Option
from cfp.search.wanted import WantedMaker, measured_options
from cfp_test.models.tiny import TINY
from cfp_test.programs.registry import PROGRAMS
from cfp_test.search.ilp import solve_ilp
from cfp_test.search.made_up import estimated, rates_of

SIZES = (("x", 4),)
# Of an estimate, on the made-up devices: ops fuse, and some moves hide behind others.
TRUTH = 0.8


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
        costs = Costs(analysis, rates_of(SIZES))
        super().__init__(costs, classics, estimates, (), in_context=False)
        self.analysis = analysis
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
        estimate_ms = self.estimates[kind].total_ms(candidate)
        # Two candidates may be one program: what they are estimated at is the same.
        name = f"{kind} {estimate_ms:.9g}"
        luck = hashlib.sha256(name.encode()).digest()[0] / 255
        again = 1.3 if candidate.remat else 1.0
        return TRUTH * estimate_ms * (1 + self.noise * luck) * again

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

    def explore(self, budget_bytes=None, per_kind=100, **options):
        return explore(
            self,
            per_kind=per_kind,
            budget_bytes=budget_bytes,
            look=self.look,
            **options,
        )

    def best(self, found, budget_bytes=None):
        """The best plan of what was measured."""
        options = measured_options(self.costs, found.wanted, found.records)
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


def test_where_memory_is_plenty_the_best_by_estimate_is_measured_and_no_more(model):
    """With the truth known, a wide beam looks at the whole space."""
    analysis, estimates = model
    devices = Devices(analysis, estimates)
    found = devices.explore()
    assert found.rounds == 0 and not found.tight
    for kind, estimate in enumerate(estimates):
        every = [
            best_candidates(estimate, mode, 1, beam_width=4096)[0] for mode in Storage
        ]
        mine = [w.candidate for w in found.wanted if w.kind == kind]
        best = min(devices.time_ms(kind, c) for c in mine)
        assert best <= TRUTH * min(c.estimate_ms for c in every) * 1.01 + 1e-9
    space = [3 * np.prod([len(s) for s in e.strategies]) for e in estimates]
    assert devices.runs < sum(space) / 5


def test_with_luck_too_what_is_found_is_near_what_all_there_is_gives(small):
    analysis, estimates = small
    devices = Devices(analysis, estimates, noise=0.05)
    best = devices.best(devices.explore())
    everything = solve_dynamically(devices.everything())
    assert best.cost_ms <= everything.cost_ms * 1.05
    assert devices.runs < sum(map(len, devices.everything().options)) / 2


def test_rounds_begin_where_something_faster_will_fit(small):
    analysis, estimates = small
    devices = Devices(analysis, estimates)
    found = devices.explore()
    assert found.rounds == 0
    fastest = devices.best(found)
    every = devices.everything(remat=(False, True))
    least = smallest_budget(every)
    began = []
    for share in (0.02, 0.5, 0.8, 1.0):
        budget = int(least + share * (fastest.memory_bytes - least))
        found = devices.explore(budget)
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
        assert best.cost_ms <= true.cost_ms * 1.021


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
            allowed.append(candidate)  # Without any there is nothing to go on from.
        return not candidate.remat and candidate not in allowed

    found = devices.explore(budget_bytes=budget)
    again = [w for w in found.wanted if w.candidate.remat]
    assert again
    assert all(np.isfinite(w.time_ms(found.records)) for w in again)
    best = devices.best(found, budget)
    assert best is None or np.isfinite(best.cost_ms)


@pytest.mark.parametrize("name", ["scalars", "no_outputs_needed"])
def test_where_nothing_can_be_chosen_nothing_is_asked_for(name):
    analysis, estimates = estimated(*PROGRAMS[name]()[:2], SIZES)
    assert Devices(analysis, estimates).explore().rounds == 0


@pytest.fixture(scope="module")
def little(model):
    """A budget that keeps out what is fastest."""
    devices = Devices(*model)
    found = devices.explore()
    return int(0.5 * devices.best(found).memory_bytes)


def test_no_more_is_measured_than_allowed(model, little):
    analysis, estimates = model
    some = Devices(analysis, estimates, noise=1.0).explore(little, per_kind=9)
    assert some.rounds > 0
    for kind in range(len(estimates)):
        mine = [w for w in some.wanted if w.kind == kind]
        first = [w for w in some.wanted[: some.required] if w.kind == kind]
        for again in (False, True):
            asked = sum(w.candidate.remat is again for w in mine)
            assert asked <= max(9, len(first))


def test_the_same_records_ask_for_the_same_things(model, little):
    """So that what is stored answers all of a second run."""
    analysis, estimates = model
    first, second = (
        [
            (w.kind, w.candidate)
            for w in Devices(analysis, estimates, noise=1.0).explore(little).wanted
        ]
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == len(first)


def test_what_is_not_known_ends_the_search(model, little):
    analysis, estimates = model
    whole = Devices(analysis, estimates, noise=1.0).explore(little)
    assert whole.rounds > 0
    devices = Devices(analysis, estimates, noise=1.0)
    known = {w.job.key.digest for w in whole.wanted[: whole.required]}

    def stored_only(jobs):
        found = Devices.look(devices, jobs)
        return {key: found[key] for key in found.keys() & known}

    devices.look = stored_only
    found = devices.explore(little)
    assert found.rounds == 1
    assert found.records.keys() == known


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


@pytest.mark.parametrize("broken", [None, Storage.SHARDED, Storage.USED])
def test_without_time_of_each_kind_one_is_measured(model, broken):
    """The first that runs, whatever time that takes: a plan takes one of each."""
    analysis, estimates = model
    devices = Devices(analysis, estimates, broken=lambda c: c.storage is broken)
    hurried = devices.explore(look_in_time=lambda jobs: {})
    good = [w for w in hurried.wanted if w.is_known(hurried.records)]
    good = [w for w in good if w.failure(hurried.records) is None]
    assert [w.kind for w in good] == [*range(len(estimates))]
    for one in good:
        before = [w for w in hurried.wanted if w.kind == one.kind]
        before = before[: before.index(one)]
        assert all(w.has_failed(hurried.records) for w in before)
    assert devices.runs == len(hurried.records)
    assert devices.best(hurried) is not None
    # With time left the rest follows, and nothing is looked up in vain.
    assert (
        devices.explore(look_in_time=devices.look).records.keys()
        == devices.explore().records.keys()
    )


class Neighbours(Devices):
    """The same, where segments are measured beside a neighbour, too."""

    def __init__(self, *given, **how):
        super().__init__(*given, **how)
        self._in_context = True
        self._pairs = {}

    def make(self, kind, candidate):
        made = super().make(kind, candidate)
        if made.pair_job:
            near, neighbour = made.neighbour
            other = self.analysis.segments[near].kind
            self._of[made.neighbour_job.key.digest] = other, neighbour
            self._pairs[made.pair_job.key.digest] = (
                (kind, candidate),
                (other, neighbour),
            )
        return made

    def again(self, base, alone=False):
        made = WantedMaker.again(self, base, alone)
        if made.pair_job:
            near, neighbour = made.neighbour
            both = (
                (made.kind, made.candidate),
                (self.analysis.segments[near].kind, neighbour),
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
    fastest = free.best(free.explore())
    budget = int(0.5 * fastest.memory_bytes)
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
    asked = [(w.kind, w.candidate, w.pair_job is None) for w in found.wanted]
    assert len(set(asked)) == len(asked)
    assert devices.best(found, budget) is not None


def test_where_nothing_can_fit_the_leanest_is_computed_again(model):
    """An error then names how little memory would do, as far as that is known."""
    devices = Devices(*model)
    found = devices.explore(1)
    again = [w for w in found.wanted if w.candidate.remat]
    assert {w.kind for w in again} == set(range(len(devices.estimates)))
    assert len(found.wanted) == found.required + len(again), "nothing else is"
