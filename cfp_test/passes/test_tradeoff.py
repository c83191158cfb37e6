"""Measurements for budgets of all sizes, and their end."""

import math
import re
import time
from types import SimpleNamespace

import jax
import pytest

from cfp.analysis.analyze import analyze
from cfp.passes import profile as profile_pass
from cfp.planner_settings import DetailedSettings
from cfp.profiling.runner import profile
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp_test.program.stacks import stack_step


@pytest.fixture(scope="module")
def mesh():
    return planning_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]))


@pytest.fixture(scope="module")
def analysis(mesh):
    step, args = stack_step()
    program, _ = trace(flatten_step(step, args, {}), mesh)
    return analyze(program, tuple(mesh.shape.items()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


find_again = profile_pass._again


@pytest.fixture
def measured(analysis, mesh, folder, monkeypatch):
    """Measures under a budget of seconds, of which some are over with each round.

    Tells the labels of each round, what in the end may be chosen of what is
    rematerialized, as (kind, candidate), and what is said of what was not measured.
    """

    def go(seconds, each=1.0):
        # With such a tolerance the search asks for nothing: all calls see the same.
        rounds, begun = [], []

        def asked(program, mesh, jobs, store, **options):
            found = profile(program, mesh, jobs, store, **options)
            if begun:
                rounds.append([job.label for job in jobs])
            return found

        def begin(*args):
            begun.append(True)
            return find_again(*args)

        def now():
            # However slow the machine is, what is not rematerialized is measured whole.
            return each * len(rounds) + 0.5 if begun else -math.inf

        monkeypatch.setattr(profile_pass, "ROUND_SIZE", 2)
        monkeypatch.setattr(profile_pass, "_again", begin)
        monkeypatch.setattr("cfp.profiling.measurer.profile", asked)
        started = SimpleNamespace(monotonic=lambda: 0.0)
        monkeypatch.setattr("cfp.context.time", started)
        clock = SimpleNamespace(monotonic=now, perf_counter=time.perf_counter)
        monkeypatch.setattr("cfp.profiling.measurer.time", clock)
        monkeypatch.setattr(profile_pass, "time", clock)
        told = []
        settings = DetailedSettings(
            per_kind=3,
            in_context=False,
            seconds=seconds,
            progress=told.append,
            measure=True,
        )
        found = profile_pass.profile_all_budgets(analysis, mesh, folder, settings)
        assert found.measured
        problem, cut = found.problem, found.cut
        assert told
        again = {
            (kind, option.candidate)
            for kind, options in enumerate(problem.options)
            for option in options
            if option.candidate.remat
        }
        return rounds, again, cut

    return go


def test_what_is_computed_again_is_measured_until_time_is_over(measured):
    none, nothing, cut = measured(0.0)
    assert (none, nothing) == ([], set())
    said = r"Not measured, since time was over: (\d+) of \d+ strategies, \1 of them rem"
    before = re.match(said, cut)
    assert before and "a longer --time-budget" in cut
    one, two, cut = measured(1.0)
    after = re.match(said, cut)
    assert after and int(after[1]) < int(before[1])
    assert len(one) == 1 and {kind for kind, _ in two} == {0, 1}
    assert "more than" not in cut
    rounds, every, cut = measured(float("inf"))
    assert not cut
    assert rounds[0] == one[0] and len(rounds) > 2
    # The fastest of each kind come first.
    numbers = [int(label.split()[1]) for labels in rounds for label in labels]
    assert numbers == sorted(numbers) and numbers[-1] == 3
    # Of two ways to shard that are one program both are known.
    assert two < every and len(every) >= len(numbers)
    # What is known counts, however late it is.
    assert measured(0.0) == ([], every, "")


def test_what_had_begun_is_awaited_and_it_is_said_how_long(measured):
    said = "Measuring took 3 s more than the 1 s asked for: what had begun, such as"
    assert said in measured(1.0, each=3.25)[2]
