import threading
from concurrent.futures import CancelledError
from pathlib import Path

import jax
import pytest

import cfp
from cfp.profiling import builder
from cfp.profiling.builder import (
    CompilePool,
    default_threads,
)
from cfp_test.support.waiting import GUARD_SECONDS, until


def threads() -> list[str]:
    every = (thread.name for thread in threading.enumerate())
    return [name for name in every if name.startswith("cfp-build")]


def test_nothing_else_compiles_in_threads():
    """A second pool would not know of the first, and take its processors.

    A plan's executable is loaded in a thread of its own, which compiles nothing.
    """
    sources = Path(cfp.__file__).parent.rglob("*.py")
    others = {one.name for one in sources if "PoolExecutor" in one.read_text()}
    assert others == {"builder.py", "execute.py"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, AssertionError])
def test_what_ends_the_body_begins_nothing_else_and_leaves_no_thread(error):
    begun, over, compiled = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        assert over.wait(GUARD_SECONDS)
        compiled.append("first")

    # It is not waited for: the thread goes on until `over`.
    with pytest.raises(error), CompilePool(1) as pool:
        one = pool.start("first", first)
        rest = [pool.start(f"{n}", lambda: compiled.append("rest")) for n in range(9)]
        begun.wait(GUARD_SECONDS)
        raise error
    assert not one.done()
    over.set()
    until(lambda: not threads())
    assert compiled == ["first"]
    for one in rest:
        with pytest.raises(CancelledError):
            one.result()


def test_an_error_names_its_program():
    def fail():
        raise AssertionError("a bug")

    with CompilePool(2) as pool:
        outcomes = [pool.start("a", int), pool.start("segment 1: 3", fail)]
        assert outcomes[0].result() == 0
        with pytest.raises(AssertionError, match="a bug") as raised:
            outcomes[1].result()
    assert raised.value.__notes__ == ["While segment 1: 3 was compiled."]


def test_threads_have_the_settings_of_what_made_the_pool():
    def settings():
        return jax.config.jax_enable_x64, jax.config.jax_debug_nans  # pyright: ignore

    with jax.enable_x64(True), jax.debug_nans(True), CompilePool(1) as pool:
        assert pool.start("one", settings).result() == (True, False)


def test_the_memory_of_a_container_bounds_that_of_its_host(monkeypatch, tmp_path):
    host = builder._host_bytes()
    limits = tmp_path / "v2", tmp_path / "v1", tmp_path / "none"
    monkeypatch.setattr(builder, "_CONTAINER_LIMITS", limits)
    limits[0].write_text("max\n")
    limits[1].write_text(f"{2**63 - 4096}\n")
    assert builder._host_bytes() >= host
    limits[1].write_text(f"{2**30}\n")
    assert builder._host_bytes() == 2**30


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    """As in a job of Slurm that has a part of its host."""
    monkeypatch.setattr(builder, "_host_bytes", lambda: 2**40)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(32)}, raising=False)
    assert default_threads("gpu") == 12
    monkeypatch.delattr("os.sched_getaffinity")
    assert default_threads("gpu") == 24
