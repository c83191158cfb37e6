"""Races for which there was no time are answered by truncated programs that fit."""

from dataclasses import replace

import jax
import pytest

import cfp
from cfp.errors import MemoryBudgetError
from cfp.profiling.compile_pool import default_threads
from cfp.program.trace import planning_mesh
from cfp.race import compile as building
from cfp.race import race
from cfp.settings import MOST_REFUSED, defaults_of
from cfp_test.race.deep import arguments, step
from cfp_test.support.covering import at_night

LAYERS = 12

pytestmark = pytest.mark.usefixtures("compiled_once", "analyzed_once")


@pytest.fixture
def late(tmp_path, monkeypatch):
    """A plan by a program that is compiled for devices with so much memory each."""

    monkeypatch.setattr(race, "_whole_seconds", lambda run, short: 1e9)

    def make(memory_bytes, donate_argnums=(), seconds=1e6):
        text = tmp_path / "small.toml"
        gib = memory_bytes / 2**30 / 0.75  # Of it programs may use three quarters.
        text.write_text(f'kind = "h200"\ndevices_per_host = 2\nmemory_gib = {gib!r}\n')
        mesh = cfp.described(str(text))
        devices = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
        mesh = replace(mesh, stand_in=planning_mesh(devices))
        settings = cfp.PlannerSettings(seconds=seconds)
        how = {"mesh": mesh, "cache_dir": tmp_path, "settings": settings}
        how["donate_argnums"] = donate_argnums
        return cfp.plan(step, *arguments(LAYERS), **how)

    return make


@pytest.mark.nightly
def test_plenty_of_memory_leaves_the_fastest(late):
    plan = late(2**30)
    assert plan.winner == "planned"
    assert plan.search.get("segments_raced") is None


@pytest.mark.parametrize("donate_argnums", [0, *at_night([((),)])])
def test_what_is_answered_fits_whole(late, donate_argnums):
    """The best fits with four of twelve layers, and not with all of them."""
    memory_bytes = 165_000
    plan = late(memory_bytes, donate_argnums)
    assert plan.rung != "measured"
    assert 0 < plan.predicted_bytes <= memory_bytes
    [best] = (row for row in plan.race if row.name == "planned")
    assert best.note == "over the memory budget"
    assert best.peak_bytes > memory_bytes
    [won] = (row for row in plan.race if row.name == plan.winner)
    assert (won.note, won.peak_bytes) == ("", plan.predicted_bytes)
    # Some were begun, on other threads, before the last of these was refused; and the
    # leader is refused with other compiler options, too.
    options = defaults_of("gpu").compiler_options
    most = MOST_REFUSED + max(4, default_threads("cpu")) + len(options)
    assert sum(row.peak_bytes > 0 for row in plan.race) <= most


@pytest.mark.nightly
def test_where_nothing_fits_the_error_says_so(late):
    with pytest.raises(MemoryBudgetError, match="compiled plans the smallest") as error:
        late(100_000)
    assert error.value.smallest_feasible_bytes > 100_000
    assert "Time for planning" not in str(error.value)


def test_where_nothing_fits_in_no_time_few_are_tried(late, monkeypatch):
    built, build = [], building.build

    def counting(program, mesh, job, environment):
        built.append(len(job.part.ops))
        return build(program, mesh, job, environment)

    monkeypatch.setattr(building, "build", counting)
    monkeypatch.setattr(building, "default_threads", lambda platform: 1)
    with pytest.raises(MemoryBudgetError, match="Time for planning was over"):
        late(100_000, seconds=0.0)
    # At first as many as a whole program is worth, and then as many smaller ones.
    assert sum(built) <= 3 * max(built)
