"""What would be measured, and why: with what only follows from other measurements."""

import jax
import pytest

from cfp.analysis.analyze import analyze
from cfp.planner import Planner
from cfp.context import PlannerSettings
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
def planner(tmp_path):
    mesh = planning_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]))
    step, args = stack_step()
    program, _ = trace(flatten_step(step, args, {}), mesh)
    analysis = analyze(program, tuple(mesh.shape.items()))
    settings = PlannerSettings(measure=True, per_kind=1, in_context=False)
    with Planner(analysis, mesh, tmp_path, settings=settings) as found:
        yield found


def test_resharding_is_listed_once_it_is_known_which(planner, monkeypatch):
    worth = [MOVE]
    monkeypatch.setattr("cfp.search.reshard.moves_worth_measuring", lambda *_: worth)
    first = find_misses(planner)
    assert not first.complete
    assert any(miss.label.startswith("segment") for miss in first.misses)
    assert not any(miss.label.startswith("resharding") for miss in first.misses)
    assert FOLLOWS in "\n".join(why_lines(first))
    planner.profile()
    done = find_misses(planner)
    assert done.complete and done.misses == ()
    assert done.known == len(planner.store)
    assert FOLLOWS not in "\n".join(why_lines(done))
    worth.append(OTHER)
    [miss] = find_misses(planner).misses
    assert miss.label == OTHER.label
    assert miss.nearest == MOVE.key(planner.mesh, planner.environment)
    data = why_data(find_misses(planner))
    assert data["complete"] is True
    assert data["misses"][0]["differing"] == {"shape": ["16,32", "16,64"]}


def test_labels_tell_moves_apart():
    assert MOVE.label == "resharding float32[16,32] from P('x',) to P(None, 'x')"
