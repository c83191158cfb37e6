"""Missing measurements, and their causes: with what only follows from others."""

from dataclasses import replace

import jax
import pytest

from cfp.analysis.analyze import analyze
from cfp.context import open_context
from cfp.passes.profile import profile
from cfp.planner_settings import DetailedSettings
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.report.misses import Miss, find_misses, why_data, why_lines
from cfp_test.program.stacks import stack_step

FOLLOWS = "worth measuring follows from what these take"


@pytest.fixture
def here(tmp_path):
    mesh = planning_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]))
    step, args = stack_step()
    program, _ = trace(flatten_step(step, args, {}), mesh)
    analysis = analyze(program, tuple(mesh.shape.items()))
    settings = DetailedSettings(measure=True, per_kind=1, in_context=False)
    with open_context(mesh, tmp_path, settings=settings) as context:
        yield context, analysis


def test_what_follows_from_times_is_listed_once_these_are_known(here):
    first = find_misses(*here)
    assert not first.complete
    assert any(miss.label.startswith("segment") for miss in first.misses)
    assert FOLLOWS in "\n".join(why_lines(first))
    profile(*here)
    done = find_misses(*here)
    assert done.complete and done.misses == ()
    assert done.known == len(here[0].store)
    assert FOLLOWS not in "\n".join(why_lines(done))
    assert why_data(done)["complete"] is True
    one, other, *_ = here[0].store.keys()
    missed = replace(done, misses=(Miss(label="a", key=one, nearest=other),))
    lines = [*why_lines(missed)]
    assert "  the nearest measurement differs in" in lines
    assert not any("\n" in line for line in lines)
