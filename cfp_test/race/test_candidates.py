"""Whole programs that may race: rematerialized presets, what was compiled before."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from cfp.analysis.analyze import analyze
from cfp.analysis.layout import Choice
from cfp.analysis.presets import PROPAGATED, presets
from cfp.context import DetailedSettings, MemoryBudget
from cfp.cost.costs import segment_candidate
from cfp.profiling.record import MEMORY_SHARE, ProfileKey, ProfileRecord
from cfp.profiling.store import ProfileStore
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.race.compile import (
    EARLIER_RUN,
    Answer,
    answer_to,
    choice_digest,
    keep_answer,
    to_race_again,
)
from cfp.race.programs import LESS_MEMORY, rematerialized, with_options
from cfp.search.guided import Candidate
from cfp.search.requests import whole_job
from cfp.search.solver import Option, Problem, scale_memory
from cfp.settings import LIMITED_MEMORY, ConstraintLevel, Replacing, defaults_of
from cfp_test.cli.cli_runner import ROOT
from cfp_test.program.stacks import stack_step

SLOW_MS, FAST_MS = 9.0, 1.0


@pytest.fixture(scope="module")
def analysis():
    step, args = stack_step()
    mesh = planning_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]))
    program, _ = trace(flatten_step(step, args, {}), mesh)
    return analyze(program, tuple(mesh.shape.items()))


def problem_of(analysis, budget_bytes):
    """Two presets, each plain and rematerialized, which frees 80 of 100 bytes.

    Every segment keeps as much; the last one also if it is rematerialized.
    """
    by_name = presets(analysis.frame)
    last = analysis.segments[-1].kind

    def options(kind):
        index = analysis.representatives[kind]
        for name, time_ms in (("data_parallel", FAST_MS), ("tensor_parallel", SLOW_MS)):
            plain = segment_candidate(analysis, index, by_name[name])
            for again in (False, True):
                yield Option(
                    candidate=replace(plain, remat=again),
                    time_ms=time_ms + again,
                    state_bytes=0,
                    residual_bytes=20 if again and kind != last else 100,
                    temp_bytes=0,
                )

    return Problem(
        kinds=tuple(s.kind for s in analysis.segments),
        options=tuple(tuple(options(k)) for k in range(len(analysis.representatives))),
        edge_ms={},
        budget_bytes=budget_bytes,
    )


def limited(problem):
    return scale_memory(problem, LIMITED_MEMORY)


def again(analysis, budget_bytes, *more):
    problem = problem_of(analysis, budget_bytes)
    by_name = presets(analysis.frame)
    names = ("data_parallel", "fully_sharded")  # Of one nothing was measured.
    asked = {name: by_name[name] for name in names}
    found = rematerialized(analysis, (problem, *(f(problem) for f in more)), asked)
    return {name: choice.remat for name, choice in found.items()}


def test_presets_compute_again_as_few_segments_as_do(analysis):
    count = len(analysis.segments)
    most = 100 * count
    assert again(analysis, most) == {}, "they fit as they are"
    [(name, one)] = again(analysis, most - 1).items()
    assert (name, len(one)) == ("data_parallel, rematerialized", 1)
    [(_, all_but_last)] = again(analysis, 20 * (count - 1) + 100).items()
    assert all_but_last == tuple(range(count - 1))


def test_presets_that_do_not_fit_have_the_compiler_to_hope_for(analysis):
    least = 20 * (len(analysis.segments) - 1) + 100
    assert again(analysis, least - 1) == {}
    assert again(analysis, least - 1, limited)
    assert again(analysis, least // 2, limited) == {}


def test_variants_keep_the_options_that_an_entry_has():
    one = Candidate("one", Choice((), ()), options={"a": "1", "b": "1"})
    [varied] = with_options(one, {"other": {"b": "2", "c": "2"}})
    assert varied.name == "one, other"
    assert varied.options == {"a": "1", "b": "2", "c": "2"}


FIRST, SECOND, THIRD = (f"2026-01-01T00:0{minute}:00+00:00" for minute in range(3))
OPTION = {"xla_gpu_enable_latency_hiding_scheduler": "False"}
SHARE = {MEMORY_SHARE: "50"}


@pytest.fixture
def known(analysis, tmp_path):
    """Puts presets into a store, and says what races beside data parallelism."""
    by_name = presets(analysis.frame)
    names = {choice: name for name, choice in by_name.items()}

    def keep(name, peak_bytes, time_ms, created=FIRST, options=None, turns=1, **how):
        race = () if created == FIRST else (("race", "of the leaders"),)
        choice = by_name[name]
        job = whole_job(analysis, choice, race, name, options=options or {}, **how)
        record = ProfileRecord(
            key=job.key.digest,
            parts=job.key.parts,
            status="ok" if time_ms else "out_of_memory",
            samples_ms=(time_ms,) * turns if time_ms else (),
            temp_bytes=peak_bytes,
            choice=job.choice,
            created=created,
        )
        store.put(record)
        return record.choice

    def found(budget_bytes, answer=None, device_bytes=None, with_limit=(), races=True):
        memory = MemoryBudget(budget_bytes=budget_bytes, device_bytes=device_bytes)
        context: Any = SimpleNamespace(
            memory=memory,
            races=races,
            store=store,
            environment=(),
            settings=DetailedSettings(),
            defaults=SimpleNamespace(
                shared_options={},
                compiler_options={"option": OPTION},
                replacing_for_memory=Replacing(),
            ),
        )
        near = [
            Candidate("planned", by_name["data_parallel"]),
            *(
                Candidate("limited", by_name[name], options=SHARE)
                for name in with_limit
            ),
        ]
        there = to_race_again(context, analysis, None, near, answer)
        found.names = [one.name for one in there]
        return [(names[one.choice], one.options) for one in there]

    with ProfileStore(tmp_path / "store.sqlite") as store:
        yield keep, found


def test_what_raced_does_so_again_unless_there_is_news(known):
    keep, found = known
    keep("data_parallel", 10, 10.0)
    zero1 = keep("zero1", 10, 10.0)
    keep("fully_sharded", 10, 9.9)
    assert found(10) == [("fully_sharded", {})]
    assert found(10, Answer("", 10.0, FIRST)) == []
    alone = Answer(zero1, 10.0, FIRST)
    assert found(10, alone) == [("zero1", {})]
    tensor_parallel = keep("tensor_parallel", 10, 9.0, SECOND)
    assert found(10, alone) == [("tensor_parallel", {})]
    assert found(9, alone) == [("zero1", {})], "it is too large for that"
    again = replace(alone, known=tensor_parallel)
    assert found(10, again) == [("tensor_parallel", {})], "as before"


def test_what_races_with_the_memory_limit_does_as_it_is_known_to_fit(known):
    keep, found = known
    keep("zero1", 10, 10.0, options=SHARE)
    assert found(10) == [("zero1", SHARE)]
    assert found(10, with_limit=["zero1"]) == [], "it races already"
    keep("zero1", 10, 9.9, options=OPTION)
    assert found(10, with_limit=["zero1"]) == [("zero1", OPTION)], "nothing tries that"
    keep("zero1", 10, 9.8)
    assert found(10, with_limit=["zero1"]) == [("zero1", {})]


def test_what_raced_before_says_so(known):
    keep, found = known
    keep("zero1", 10, 10.0)
    found(10, Answer(keep("fully_sharded", 10, 9.9), 9.9, FIRST))
    assert found.names == ["from an earlier run"]
    keep("zero1", 10, 9.0, SECOND, level=ConstraintLevel.ARGUMENTS)
    found(10)
    assert found.names == ["from an earlier run, arguments constrained"]


def test_what_was_known_before_is_no_news_if_clocks_drift(known):
    keep, found = known
    zero1 = keep("zero1", 10, 10.0)
    keep("fully_sharded", 10, 10.0)
    slower = Answer(zero1, 11.0, SECOND)
    assert found(10, slower) == [("zero1", {})]
    keep("fully_sharded", 10, 9.9, THIRD)
    assert found(10, slower) == [("fully_sharded", {})]


def test_what_is_known_to_be_the_fastest_races_with_its_options(known):
    """Only what leads without them is raced with options, and that is not known yet."""
    keep, found = known
    keep("data_parallel", 20, 10.0)
    keep("data_parallel", 10, 9.0, SECOND, OPTION)
    assert found(20) == [("data_parallel", OPTION)]
    assert found(19) == [("data_parallel", OPTION)]


def test_what_won_with_its_options_races_before_what_had_a_look(known):
    """Looks are shorter than turns, so that what they time seems to be faster."""
    keep, found = known
    keep("data_parallel", 10, 9.8)
    keep("zero1", 10, 9.9)
    keep("data_parallel", 10, 10.0, SECOND, OPTION, turns=3)
    assert found(20) == [("data_parallel", OPTION)]
    assert found(20, Answer("", 10.1, FIRST)) == []
    keep("fully_sharded", 10, 9.7, SECOND)
    assert found(20, Answer("", 10.1, FIRST)) == [], "it had a look alone"
    assert found(20, Answer("", 11.0, FIRST)) == [("data_parallel", OPTION)]
    keep("tensor_parallel", 10, 9.0, SECOND)
    assert found(20) == [("tensor_parallel", {})], "a turn would be faster, too"
    assert found(20, Answer("", 10.1, FIRST)) == [("tensor_parallel", {})]


def test_what_lost_a_race_with_its_options_is_no_news_to_its_answer(known, tmp_path):
    """Another race, of three turns, had it when the devices were faster."""
    keep, found = known
    lost = keep("data_parallel", 10, 9.0, SECOND, OPTION, turns=3)
    asked = ProfileKey((("what", "the programs of a race"),))
    with ProfileStore(tmp_path / "answers.sqlite") as store:
        for raced, old in (([lost], []), ([], [("data_parallel", OPTION)])):
            answer = Answer("", 10.0, FIRST, tuple(map(choice_digest, raced)))
            keep_answer(asked, store, answer)
            assert answer_to(asked, store) == answer
            assert found(10, answer) == old
        store.put(replace(store.get(asked.digest), choice="[]"), replace=True)
        assert answer_to(asked, store) is None


def test_what_fits_with_another_memory_limit_races(known):
    """Not every one that is too large gets the memory limit: only the most hopeful."""
    keep, found = known
    keep("data_parallel", 200, 10.0)
    share = {MEMORY_SHARE: "10"}
    keep("data_parallel", 100, 11.0, SECOND, share)
    assert found(100, device_bytes=1000) == [("data_parallel", share)]
    assert found(99, device_bytes=1000) == [("data_parallel", share)], "the leanest"
    assert found(200, device_bytes=1000) == [("data_parallel", share)]


def test_names_in_tables_are_explained():
    """The guide to tables has a line for each."""
    page = (ROOT / "docs" / "reading-plans.md").read_text()
    section = page.partition("## Names in the table of the race")[2].partition("## ")[0]
    levels = [f"{one} constrained" for one in ConstraintLevel][1:]
    rules = defaults_of("cuda")
    options = *rules.compiler_options, *rules.slow_to_tune
    for name in (EARLIER_RUN, LESS_MEMORY, *PROPAGATED, *levels, *options):
        assert f"*{name}*" in section, name
