"""Progress while something is measured, on terminals and elsewhere."""

import io
import math
import threading
from contextlib import redirect_stderr
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import cfp
from cfp.profiling.coordination import PROCESS_ID
from cfp.profiling.tasks import Progress
from cfp.view import console as room
from cfp.view.console import Display, PlainLines, shown
from cfp_test.support.waiting import until


def measuring(done: int, seconds: float) -> Progress:
    return Progress(
        done=done,
        cached=1,
        failed=0,
        total=9,
        best_ms=1.25 if done else math.inf,
        label=f"segment 0: {done}",
        phase="run",
        elapsed_seconds=seconds,
    )


@pytest.mark.smoke
def test_a_line_stands_at_each_beginning_and_every_half_minute():
    lines = PlainLines()
    found = {}
    for second in range(150):
        event = measuring(second // 10, second)
        if second >= 80:
            event = "compiling planned, 1 of 2"
        if (line := lines.due(event, second)) is not None:
            found[second] = line
    assert found == {
        10: "cfp 0:10: measuring 1/9, 1 cached, running segment 0: 1, best 1.25 ms",
        40: "cfp 0:40: measuring 4/9, 1 cached, running segment 0: 4, best 1.25 ms",
        70: "cfp 1:10: measuring 7/9, 1 cached, running segment 0: 7, best 1.25 ms",
        80: "cfp 1:20: compiling planned, 1 of 2",
        110: "cfp 1:50: compiling planned, 1 of 2",
        140: "cfp 2:20: compiling planned, 1 of 2",
    }


def test_quiet_changes_no_other_setting():
    """So quiet plans are searched for as long as others."""
    settings = cfp.PlannerSettings(seconds=3.0)
    with redirect_stderr(io.StringIO()):
        found = []
        for quiet in (True, False):
            with shown(settings, "planning", "", quiet) as how:
                found.append(how)
    assert found[0] == settings == replace(found[1], progress=None) != found[1]


def test_the_same_kind_of_work_is_one_phase():
    lines = PlainLines()
    events = ["compiling planned", "compiling zero1", "timing planned, turn 1 of 3"]
    found = [lines.due(event, 20.0 + i) for i, event in enumerate(events)]
    assert found == ["cfp 0:20: compiling planned", None, f"cfp 0:22: {events[2]}"]


@pytest.fixture(autouse=True)
def looked_at_often(monkeypatch):
    """And no time is over."""
    monkeypatch.setattr(room, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: 0.0))


class Counted(PlainLines):
    """Counts how often it was asked for a line."""

    asked = 0

    def due(self, event, seconds):
        self.asked += 1
        return super().due(event, seconds)


def at_once() -> Counted:
    return Counted(silent_seconds=0.0)


def writers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "cfp-progress"]


def test_without_a_terminal_lines_go_to_the_error_stream(capsys):
    stream = io.StringIO()
    with redirect_stderr(stream), Display(lines=at_once()) as display:
        display.tell("compiling planned")
        until(lambda: "compiling planned\n" in stream.getvalue())
    assert not writers(), "nothing is left that could write"
    assert capsys.readouterr() == ("", "")


def test_quiet_work_says_nothing():
    stream = io.StringIO()
    with redirect_stderr(stream), Display(quiet=True, lines=at_once()) as display:
        display.tell("compiling planned")
        assert not writers(), "there is nothing that could write"
    assert stream.getvalue() == ""


def test_short_work_says_nothing():
    stream, lines = io.StringIO(), Counted()
    with redirect_stderr(stream), Display(lines=lines) as display:
        display.tell("compiling planned")
        until(lambda: lines.asked > 2)
    assert stream.getvalue() == ""


def test_an_error_stream_that_is_not_read_ends_no_work():
    stream, lines = io.StringIO(), at_once()
    stream.close()
    with redirect_stderr(stream), Display(lines=lines) as display:
        display.tell("compiling planned")
        until(lambda: lines.asked > 0 and not writers())


class Terminal(io.StringIO):
    """An error stream that takes itself for a terminal."""

    def isatty(self) -> bool:
        return True


def test_other_processes_than_the_first_say_nothing(monkeypatch):
    monkeypatch.setenv(PROCESS_ID, "1")
    stream = io.StringIO()
    with redirect_stderr(stream), shown(None, "planning f", "quiet", False):
        assert not writers(), "there is nothing that could write"
    assert stream.getvalue() == ""


def test_on_a_terminal_a_live_line_tells_what_is_being_done(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with redirect_stderr(stream), shown(None, "planning f", "quiet", False) as how:
        assert how.progress is not None
        how.progress("compiling planned")
        until(lambda: "compiling planned" in stream.getvalue())
    assert "planning f" not in stream.getvalue(), "that is for logs"


def planned_twice(quiet: bool) -> tuple[str, str]:
    """Returns the error stream of a parallelized step's first and second call.

    Nothing is timed: where nothing can be sharded there is nothing to race.
    """
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])

    @cfp.parallelize(mesh=mesh, quiet=quiet)
    def odd_step(x):
        return x + 1.0

    said = []
    for _ in range(2):
        stream = io.StringIO()
        with redirect_stderr(stream):
            odd_step(jnp.ones(3))
        said.append(stream.getvalue())
    return said[0], said[1]


def test_a_parallelized_step_says_once_what_takes_the_time_and_how_to_silence_it(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CFP_CACHE_DIR", str(tmp_path))
    first, second = planned_twice(quiet=False)
    assert first == (
        "cfp: planning how to shard 'odd_step', once for its first call. "
        "cfp.parallelize(..., quiet=True) hides these lines\n"
    )
    assert second == ""
    assert planned_twice(quiet=True) == ("", "")


@pytest.mark.filterwarnings("ignore:'step' is planned again:UserWarning")
def test_what_is_planned_again_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("CFP_CACHE_DIR", str(tmp_path))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])

    @cfp.parallelize(mesh=mesh)
    def step(x, rate):
        return jax.tree.map(lambda value: value * rate, x)

    calls = [
        (jnp.ones(3), 0.5),
        (jnp.ones(4), 0.5),
        (jnp.ones(4), jnp.float32(0.5)),
        ([jnp.ones(4)], jnp.float32(0.5)),
        ([jnp.ones(5)], jnp.int32(2)),
    ]
    wanted = [
        "once for its first call",
        "again, for x of type float32[4], was float32[3]",
        "again, for a number in place of an array, or the reverse",
        "again, for arguments of another structure (missing: x; not there before: x/0)",
        "again, for x/0 of type float32[5], was float32[4] and 1 more",
    ]
    for args, why in zip(calls, wanted, strict=True):
        stream = io.StringIO()
        with redirect_stderr(stream):
            step(*args)
        assert f"'step', {why}. " in stream.getvalue()
    stream = io.StringIO()
    with redirect_stderr(stream), jax.default_matmul_precision("highest"):
        step(*args)
    assert "again, under another configuration of JAX" in stream.getvalue()


@pytest.mark.filterwarnings("ignore:.* is planned again:UserWarning")
def test_a_static_argument_that_changed_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CFP_CACHE_DIR", str(tmp_path))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])

    @cfp.parallelize(mesh=mesh, static_argnames="power")
    def step(x, power):
        return x**power

    with redirect_stderr(io.StringIO()) as stream:
        step(jnp.ones(3), power=2)
        step(jnp.ones(3), power=3)
    assert "again, for static arguments {1: 3}, were {1: 2}. " in stream.getvalue()


@pytest.fixture
def dropping():
    """A module with dropout, and a step that returns it."""

    def act(drop, x):
        return drop, drop(x @ x.T)

    return nnx.Dropout(0.5, rngs=nnx.Rngs(0)), act


@pytest.mark.filterwarnings("ignore:.* is planned again:UserWarning")
def test_a_setting_of_a_module_that_changed_is_named(tmp_path, monkeypatch, dropping):
    monkeypatch.setenv("CFP_CACHE_DIR", str(tmp_path))
    mesh, (drop, act) = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), dropping
    step = cfp.parallelize(act, mesh=mesh)
    changed = "drop/deterministic = True, was False"
    with redirect_stderr(io.StringIO()) as stream:
        step(drop, jnp.ones((4, 4)))
        drop.eval()
        step(drop, jnp.ones((4, 4)))
    assert f"again, for arguments of another structure ({changed})" in stream.getvalue()
    step.plan.save(tmp_path / "plan.json")
    kept = cfp.parallelize(act, plan=tmp_path / "plan.json", quiet=True)
    drop.train()
    kept(drop, jnp.ones((4, 4)))
    drop.eval()
    with pytest.raises(cfp.PlanMismatch) as refused:
        kept(drop, jnp.ones((4, 4)))
    first, *_ = str(refused.value).split("\n")
    assert first == f"The arguments have another structure: {changed}."


def test_a_plan_from_python_says_what_it_does_and_how_to_silence_it(tmp_path):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])

    def odd_step(x):
        return x + 1.0

    def said(**options) -> str:
        with redirect_stderr(io.StringIO()) as stream:
            cfp.plan(odd_step, jnp.ones(3), mesh=mesh, cache_dir=tmp_path, **options)
        return stream.getvalue()

    doing = "planning how to shard 'odd_step'"
    assert said() == f"cfp: {doing}. quiet=True hides these lines\n"
    assert said(quiet=True) == ""
    assert said(settings=cfp.PlannerSettings(progress=lambda event: None)) == ""
