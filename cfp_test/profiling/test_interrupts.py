"""Interrupts while a plan is made: what arrives where nothing can be raised out of."""

import gc
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.profiling.interrupts import handle_keyboard_interrupt, interrupted_text
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore, store_path
from cfp_test.support.checking import make_mesh
from cfp_test.support.waiting import GUARD_SECONDS


class Interrupts:
    """Interrupts when it goes, where Python drops what is raised."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def answered():
    """Python answers the signal, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


ONE = ProfileRecord(key="a", parts=(), status="ok", samples_ms=(1.0,))


@pytest.fixture
def folder(tmp_path):
    """Folder in which something was measured."""
    with ProfileStore(store_path(tmp_path)) as store:
        store.put(ONE)
    return tmp_path


@pytest.fixture
def dropped(small_heap, monkeypatch):
    """Exceptions that Python itself had to drop."""
    gc.collect()
    found = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: found.append(args.exc_type))
    return found


def test_what_was_dropped_arrives_a_moment_later(folder, dropped):
    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt, match=r"kept in .*; the same call goes on"):
        with handle_keyboard_interrupt(folder):
            Interrupts()
            threading.Event().wait(GUARD_SECONDS)
    assert dropped == [] and sys.unraisablehook is hook


def test_what_was_dropped_again_arrives_after_that(folder, dropped):
    left = [Interrupts(), Interrupts()]
    with pytest.raises(KeyboardInterrupt), handle_keyboard_interrupt(folder):
        while left:
            left.pop()
        # One is sent for both: another would arrive when all this is over.
        timers = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
        assert len(timers) == 1
        threading.Event().wait(GUARD_SECONDS)
    assert dropped == []


def test_what_other_threads_drop_interrupts_nothing(folder, dropped):
    class Fails:
        def __del__(self):
            raise KeyboardInterrupt

    with handle_keyboard_interrupt(folder):
        thread = threading.Thread(target=Fails)
        thread.start()
        thread.join()
    assert dropped == [KeyboardInterrupt]


@pytest.mark.explained("Interrupted")
def test_what_was_dropped_last_arrives_at_the_end(folder, dropped):
    with (
        pytest.raises(KeyboardInterrupt, match=r"^Interrupted\."),
        handle_keyboard_interrupt(folder),
    ):
        Interrupts()
    assert dropped == []


def test_a_programs_own_handler_is_left_alone(folder, dropped):
    """It may count signals: nothing is sent that the user did not send."""
    seen = []

    def own(number, frame):
        seen.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, own)
    try:
        with handle_keyboard_interrupt(folder):
            Interrupts()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT] and dropped == [KeyboardInterrupt]


def test_other_errors_are_reported_as_before(folder, dropped):
    class Fails:
        def __del__(self):
            raise ValueError

    with handle_keyboard_interrupt(folder):
        Fails()
    assert dropped == [ValueError]


def test_another_thread_changes_nothing(folder, dropped):
    hook, seen = sys.unraisablehook, []

    def look():
        with handle_keyboard_interrupt(folder):
            seen.append(sys.unraisablehook)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [hook]


def test_where_nothing_is_kept_nothing_is_promised(tmp_path):
    nothing = "Interrupted. Nothing was measured yet."
    assert interrupted_text(tmp_path / "none", "the same call") == nothing
    with ProfileStore(store_path(tmp_path)) as store:
        assert interrupted_text(tmp_path, "the same call") == nothing
        store.put(ONE)
    kept = f"1 measurement is kept in {store_path(tmp_path)}; the same call goes on"
    assert kept in interrupted_text(tmp_path, "the same call")


def test_planning_ends_though_the_collector_is_interrupted(tmp_path, dropped):
    """As by a user who happens to press Ctrl-C while garbage is collected."""
    left = ["one"]

    def collecting(phase, info):
        if phase == "start" and left and threading.current_thread() is main:
            left.clear()
            signal.raise_signal(signal.SIGINT)

    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: ((x @ w - x) ** 2).mean())(w)
        return w - 0.1 * grad, loss

    def tell(event):
        gc.callbacks.append(collecting)
        gc.collect()
        gc.callbacks.remove(collecting)

    main = threading.main_thread()
    settings = cfp.PlannerSettings(progress=tell, measure=True, race=False)
    how = {"mesh": make_mesh((("x", 4),)), "cache_dir": tmp_path, "settings": settings}
    # How much was measured by then, time decides.
    with pytest.raises(KeyboardInterrupt, match=r"(Nothing was measured yet| kept in)"):
        cfp.plan(step, jnp.ones((16, 16)), jnp.ones((8, 16)), **how)
    assert left == [] and dropped == []


@pytest.mark.parametrize("mesh", [make_mesh, None], ids=["one mesh", "all"])
def test_reading_a_step_is_interrupted_as_calmly(tmp_path, mesh):
    def step(x):
        raise KeyboardInterrupt

    mesh = mesh and mesh((("x", 4),))
    with pytest.raises(KeyboardInterrupt, match="Nothing was measured yet"):
        cfp.plan(step, jnp.ones((8, 8)), mesh=mesh, cache_dir=tmp_path)


def test_compiling_what_was_planned_is_interrupted_as_calmly(folder, monkeypatch):
    def interrupted(plan, tell):
        raise KeyboardInterrupt

    monkeypatch.setattr(cfp.Plan, "compile_bound", interrupted)
    step = cfp.parallelize(
        lambda x: (x @ x).sum(),
        mesh=make_mesh((("x", 4),)),
        preset="data_parallel",
        cache_dir=folder,
        settings=cfp.PlannerSettings(race=False),
        quiet=True,
    )
    with pytest.raises(KeyboardInterrupt, match="1 measurement is kept"):
        step(jnp.ones((8, 8)))
