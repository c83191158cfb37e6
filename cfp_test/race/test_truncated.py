"""Races of truncated programs predict those of whole ones, choice by choice."""

from dataclasses import replace

import jax
import pytest

from cfp.cost.choice import segment_candidate
from cfp.cost.memory import fixed_bytes
from cfp.presets.presets import presets
from cfp.program.trace import planning_mesh
from cfp.race.truncated import truncate
from cfp.search.problem import Option, Problem
from cfp_test.analysis.stacks import ADAM, KEPT, analysed, plain, stack_of

LAYERS = 20


@pytest.fixture(scope="module")
def analysis():
    mesh = planning_mesh(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]))
    return analysed(*stack_of(plain, LAYERS, ADAM), mesh)


@pytest.fixture(scope="module")
def problem(analysis):
    """Two presets of which segments keep 100 bytes, or 10 if rematerialized."""
    by_name = presets(analysis.frame)

    def options(kind, index):
        for name, time_ms in (("data_parallel", 3.0), ("fully_sharded", 4.0)):
            candidate = segment_candidate(analysis, index, by_name[name])
            for again in (False, True):
                yield Option(
                    candidate=replace(candidate, remat=again),
                    time_ms=time_ms + kind + 2 * again,
                    state_bytes=1000,
                    residual_bytes=10 if again else 100,
                    temp_bytes=0,
                )

    every = enumerate(analysis.representatives)
    return Problem(
        kinds=tuple(segment.kind for segment in analysis.segments),
        options=tuple(tuple(options(*kind)) for kind in every),
        edge_ms={},
        fixed_bytes=fixed_bytes(analysis, analysis.frame.program.args),
    )


def test_each_way_to_treat_layers_has_a_program_of_its_own(analysis, problem):
    by_name = presets(analysis.frame)
    data, sharded = by_name["data_parallel"], by_name["fully_sharded"]
    half = replace(data, remat=tuple(range(len(analysis.segments) // 2)))
    found = truncate(analysis, problem, [data, sharded, half], KEPT)
    assert found is not None
    programs = {choice: program for choice, (program, _) in found.items()}
    assert programs[data] is programs[sharded]
    assert len(programs[data].segments) < len(programs[half].segments)
    assert len(programs[half].segments) < 0.7 * len(analysis.segments)
    for choice, time_ms in ((data, 3.0), (sharded, 4.0), (half, 3.0)):

        def taken(indices, choice=choice, time_ms=time_ms):
            again = set(choice.remat)
            kinds = (analysis.segments[i].kind + 2 * (i in again) for i in indices)
            return sum(time_ms + kind for kind in kinds)

        whole, left = range(len(analysis.segments)), programs[choice].segments
        ratio = taken(whole) / taken(left)
        assert found[choice][1].time == pytest.approx(ratio)
    # Of the half what is kept differs, and so does what it says of memory.
    ratios = [found[choice][1].memory for choice in (data, half)]
    assert ratios[0] > ratios[1] > 1


def test_what_the_profiles_do_not_know_is_scaled_like_its_like(analysis, problem):
    by_name = presets(analysis.frame)
    data, tensor = by_name["data_parallel"], by_name["tensor_parallel"]
    found = truncate(analysis, problem, [data, tensor], KEPT)
    assert found is not None
    assert found[tensor][1] == found[data][1]
    half = replace(tensor, remat=tuple(range(len(analysis.segments) // 2)))
    assert truncate(analysis, problem, [data, tensor, half], KEPT) is None


def test_a_choice_that_cannot_be_truncated_has_all_race_whole(analysis, problem):
    data = presets(analysis.frame)["data_parallel"]
    few = tuple(i for i in range(len(analysis.segments)) if i % 5 < i // 5)
    mixed = replace(data, remat=few)
    assert truncate(analysis, problem, [data], KEPT) is not None
    assert truncate(analysis, problem, [data, mixed], KEPT) is None
