"""What would be measured, and why: with what only follows from other measurements."""

import jax
import pytest

from cfp.analysis.analyze import analyze
from cfp.context import PlannerSettings, open_context
from cfp.passes.profile import profile
from cfp.profiling.moves import Move
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.report.why import find_misses, why_data, why_lines
from cfp_test.program.test_recompute import stack_step

ROWS, COLUMNS = (("x",), ()), ((), ("x",))
MOVE = Move((16, 32), "float32", ROWS, COLUMNS)
OTHER = Move((16, 64), "float32", ROWS, COLUMNS)
FOLLOWS = "resharding, follows from what these take"


@pytest.fixture
def here(tmp_path):
    mesh = planning_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]))
    step, args = stack_step()
    program, _ = trace(flatten_step(step, args, {}), mesh)
    analysis = analyze(program, tuple(mesh.shape.items()))
    settings = PlannerSettings(measure=True, per_kind=1, in_context=False)
    with open_context(mesh, tmp_path, settings=settings) as context:
        yield context, analysis


def test_resharding_is_listed_once_it_is_known_which(here, monkeypatch):
    worth = [MOVE]
    monkeypatch.setattr("cfp.search.reshard.moves_worth_measuring", lambda *_: worth)
    first = find_misses(*here)
    assert not first.complete
    assert any(miss.label.startswith("segment") for miss in first.misses)
    assert not any(miss.label.startswith("resharding") for miss in first.misses)
    assert FOLLOWS in "\n".join(why_lines(first))
    profile(*here)
    done = find_misses(*here)
    assert done.complete and done.misses == ()
    assert done.known == len(here[0].store)
    assert FOLLOWS not in "\n".join(why_lines(done))
    worth.append(OTHER)
    [miss] = find_misses(*here).misses
    assert miss.label == OTHER.label
    assert miss.nearest == MOVE.key(here[0].mesh, here[0].environment)
    data = why_data(find_misses(*here))
    assert data["complete"] is True
    assert data["misses"][0]["differing"] == {"shape": ["16,32", "16,64"]}


def test_labels_tell_moves_apart():
    assert MOVE.label == "resharding float32[16,32] from P('x',) to P(None, 'x')"
