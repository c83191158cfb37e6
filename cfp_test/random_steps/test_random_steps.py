"""Random steps: some of them, what they found, and what they must find."""

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from cfp.settings import ConstraintLevel
from cfp_test.random_steps.check import RIGHT, WRONG, Subject, check, twin_of
from cfp_test.random_steps.compare import allowed_of, wrong_leaves
from cfp_test.random_steps.faults import FAULTS, MOST
from cfp_test.random_steps.program import Block, Spec, build, draw_spec
from cfp_test.random_steps.run import read, run_slice, ways_of
from cfp_test.random_steps.shrink import shrink
from cfp_test.random_steps.ways import Sharding, Way, sharding_of
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

pytestmark = pytest.mark.usefixtures("compiled_once")

# Drawn to be of many kinds; each of a second or two.
SEEDS = (0, 2, 3, 4, 10, 12)
XY = (("x", 2), ("y", 2))


@functools.cache
def subject_of(spec):
    """A step, and what differs from one device by no more than it may."""
    subject = Subject.of(spec)
    return subject, subject.allowed()


@pytest.mark.parametrize("seed", [*SEEDS[:3], *at_night(SEEDS[3:])])
def test_some_steps_are_right(seed):
    """Fixed seeds under few ways each."""
    found = check(draw_spec(seed), ways_of(seed, 4), most=4)
    assert found.note == ""
    assert [one for one in found.tried if one.outcome == WRONG] == []
    assert sum(one.outcome == RIGHT for one in found.tried) >= 2


def test_a_seed_decides_everything():
    assert draw_spec(5) == draw_spec(5)
    assert ways_of(5, 10) == ways_of(5, 10)
    one, two = (build(draw_spec(5)) for _ in range(2))
    assert one.kinds == two.kinds


@pytest.mark.parametrize(
    ("seed", "level"),
    [
        *((0, level) for level in ConstraintLevel),
        *at_night((3, level) for level in ConstraintLevel),
    ],
)
def test_scatters_at_every_level(seed, level):
    """Indices that are padded were written by, where activations alone were held."""
    block = Block("scatter_many", 179774)
    spec = Spec((("x", 3), ("y", 2)), (7, 8), (block,), optimizer="sgd")
    subject, allowed = subject_of(spec)
    choice = sharding_of(subject.analysis, Way("random", seed)).choice
    decided = subject.decided(Way("random", seed), Sharding(choice, level))
    compiled = subject.compiled(*decided)
    assert subject.differs(compiled, allowed) == []


def test_what_the_compiler_gets_wrong_is_constrained_at_every_level():
    """XLA, free to choose, aborts on a pad that cuts off and spreads."""
    subject = Subject.of(Spec(XY, (12, 5), (Block("pad", 1),)))
    program = subject.analysis.frame.program
    [pad] = [op for op in program.ops if op.kind == "pad" and op.rule.held][:1]
    choice = sharding_of(subject.analysis, Way("random", 0)).choice
    for level in ConstraintLevel:
        sharding = Sharding(choice, level)
        *_, constraints = subject.decided(Way("random", 0), sharding)
        assert pad.results[0] in constraints.values, level


def test_slices_of_every_nth_row_in_a_loop():
    """The loop carries what is sharded; XLA, left to choose, reads other rows of it."""
    blocks = (Block("scan_layers", 198169),)
    spec = Spec((("x", 2),), (2, 8, 4, 4), blocks, "none", donated=True)
    subject, way = Subject.of(spec), Way("preset, some blocks random", 200582)
    decided = subject.decided(way, sharding_of(subject.analysis, way))
    assert subject.differs(subject.compiled(*decided), subject.allowed()) == []


@pytest.mark.parametrize("level", ConstraintLevel)
def test_transforms_are_constrained_at_every_level(level):
    """XLA aborts the process where it shards a transformed dim itself."""
    spec = Spec(
        (("x", 2), ("y", 2), ("z", 2)),
        (4, 6, 8),
        (Block("fft", 797419),),
        "adam",
        microbatches=4,
        donated=True,
        echoes=True,
    )
    subject, way = Subject.of(spec), Way("preset", 0)
    choice = sharding_of(subject.analysis, way).choice
    _, _, constraints = subject.decided(way, Sharding(choice, level))
    program = subject.analysis.frame.program
    ops = [op for op in program.ops if op.kind == "fft"]
    assert ops and all(op.rule.held for op in ops)
    if level is not ConstraintLevel.EVERYTHING:
        assert all((op.id, 0) in constraints.uses for op in ops)


@pytest.mark.parametrize("level", ConstraintLevel)
@pytest.mark.parametrize("seed", [0, *at_night([1, 2, 3])])
def test_gradients_of_windows_that_overlap_at_every_level(level, seed):
    """XLA, left to choose, loses what windows of two shards add to one place."""
    blocks = (Block("einsum", 80113), Block("reduce_window", 219636))
    spec = Spec((("x", 3), ("y", 2)), (4, 6, 8), blocks, "rmsprop")
    subject, allowed = subject_of(spec)
    way = Way("preset, some blocks random", seed)
    choice = sharding_of(subject.analysis, way).choice
    decided = subject.decided(way, Sharding(choice, level))
    assert subject.differs(subject.quickly_compiled(*decided), allowed) == []


def test_products_over_several_dims_at_every_level():
    """XLA, left to choose, sums the wrong pairs in gradients of these weights."""
    blocks = (Block("tied", 512894), Block("dense", 547047))
    spec = Spec(XY, (4, 8, 4, 8), blocks, "adafactor", microbatches=2)
    subject, way = Subject.of(spec), Way("random", 997964)
    choice = sharding_of(subject.analysis, way).choice
    allowed = subject.allowed()
    for level in ConstraintLevel:
        decided = subject.decided(way, Sharding(choice, level))
        assert subject.differs(subject.compiled(*decided), allowed) == [], level


def test_two_steps_of_the_same_types_share_no_executable(tmp_path):
    spec = draw_spec(2)
    ways = [Way("preset", 0)]
    for one in (spec, twin_of(spec)):
        [tried] = check(one, ways, tmp_path).tried
        assert tried.outcome == RIGHT, tried.why


def test_a_lost_share_does_not_pass():
    """A result of half the sum, or with one row of eight missing."""
    whole = np.ones((8, 4), np.float32)
    [allowed] = allowed_of([whole], [1e-6], [None])
    missing = whole.copy()
    missing[3] = 0
    assert wrong_leaves(["sum"], [whole], [whole], [allowed]) == []
    for bad in (whole / 2, missing):
        assert len(wrong_leaves(["sum"], [bad], [whole], [allowed])) == 1


@pytest.mark.nightly
def test_what_is_wrong_shrinks(monkeypatch):
    """To the block that a fault is in, with what is needed to run it again."""
    monkeypatch.setattr("cfp.program.rules._unpadded", lambda rule: rule)
    blocks = (Block("unary", 3), Block("scatter_many", 179774))
    spec = Spec((("x", 3), ("y", 2)), (7, 8), blocks, "adam", microbatches=2)
    way = Way("random", 0)
    [tried] = check(spec, [way]).tried
    assert tried.outcome == WRONG
    found = shrink(spec, way, most=20)
    assert [block.kind for block in found.spec.blocks] == ["scatter_many"]
    assert found.spec.optimizer in ("sgd", "none")
    assert found.spec.microbatches == 1
    assert dict(found.spec.mesh) == {"x": 2, "y": 2}
    text = str(found)
    assert "check(Spec(" in text
    assert "scatter" in text


def test_runs_go_on_where_they_were(tmp_path):
    file = tmp_path / "rows.jsonl"
    run_slice([4], 2, file)
    file.write_text(file.read_text() + '{"started": 5}\n')
    rows, done = read(file)
    assert done == {4}
    assert {row["seed"] for row in rows} == {4}
    assert make_mesh(rows[0]["spec"]["mesh"]).size >= 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name):
    """In a process of its own: what XLA makes of a fault may end it."""
    command = [sys.executable, "-m", "cfp_test.random_steps.faults", name]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["programs"] is not None, found
    assert found["programs"] <= MOST
