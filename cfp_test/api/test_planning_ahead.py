"""Plans for devices that are not there, and what becomes of them on those that are."""

from __future__ import annotations

import json
import re
import sys
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import cfp
from cfp.analysis.storage import Storage
from cfp.checking.verify import verified_data, verified_text, verify
from cfp.context import DetailedSettings
from cfp.errors import CfpError, MemoryBudgetError, PlanMismatch
from cfp.passes import analyze_step
from cfp.printable import format_bytes
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh
from cfp.race.programs import TOO_LATE
from cfp.settings import ConstraintLevel
from cfp.targets import resolve
from cfp.view.remarks import remarks
from cfp.view.words import VERIFIED, headline
from cfp_test.api.updown import SHAPES, arguments, step
from cfp_test.support.golden import plan_text

WEIGHTS = sum(4 * rows * columns for rows, columns in SHAPES.values())


def masked_step(params, batch):
    params, loss = step(params, batch["x"])
    return params, loss / batch["mask"].sum()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planned")


@pytest.fixture(scope="module")
def ahead(folder):
    mesh = cfp.described("4xh200")
    return cfp.plan(step, *arguments(), mesh=mesh, donate_argnums=0, cache_dir=folder)


@pytest.fixture(scope="module")
def mesh():
    return planning_mesh(Mesh(np.array(jax.devices()[:4]), ("x",)))


def test_a_plan_by_estimates_says_so_everywhere(ahead):
    assert ahead.rung == "estimated"
    assert ahead.measured_ms is None and ahead.peak_bytes is None
    assert ahead.predicted_ms > 0 and ahead.predicted_bytes > 0
    assert all(row.time_ms is None and not row.samples_ms for row in ahead.race)
    data = json.loads(ahead.to_json())
    assert data["rung"] == "estimated"
    assert data["environment"]["described"] == "4xh200"
    for text in (repr(ahead), plan_text(ahead, width=200)):
        assert "as 4xh200 is described" in text
        # The verdict first: on an H200 JAX takes 0.75 of 141 GB.
        verdict = r"fits in \d+\.\d+ MiB of \d+\.\d+ GiB on each device, estimated"
        assert re.search(verdict, " ".join(text.split())[:300]), text[:400]
        assert "estimated" in text and "measured," not in text
        assert "JAX's default share" in " ".join(text.split())
    chosen = r"run or compiled; next, tensor_parallel: 0\.\d+ ms"
    assert re.search(chosen, " ".join(repr(ahead).split())), ahead
    assert "Estimates" in plan_text(ahead, width=200) and "Race" not in plan_text(
        ahead, width=200
    )


def test_the_chosen_is_estimated_no_slower_than_the_presets(ahead):
    times = {row.name: row.predicted_ms for row in ahead.race}
    assert {"data_parallel", "fully_sharded"} <= times.keys()
    assert ahead.predicted_ms == pytest.approx(min(times.values()))


def test_it_is_saved_and_applied_on_devices_later(ahead, folder, mesh):
    file = folder / "plan.json"
    ahead.save(file)
    params = {n: jnp.full(s, 0.01, jnp.float32) for n, s in SHAPES.items()}
    x = jnp.linspace(-1, 1, 64 * 256).reshape(64, 256)
    expected, value = step(params, x)
    loaded = cfp.Plan.load(file).on(mesh, other_devices=True)
    assert (loaded.rung, loaded.predicted_bytes) == ("estimated", ahead.predicted_bytes)
    got, found = loaded.apply(step)(params, x)
    assert float(found) == pytest.approx(float(value), rel=1e-4)
    np.testing.assert_allclose(got["up"], expected["up"], rtol=1e-4, atol=1e-7)


def test_without_devices_it_cannot_run(ahead):
    with pytest.raises(PlanMismatch, match="and these are") as refused:
        ahead.compile_bound()
    said = " ".join(str(refused.value).split())
    assert "for 4 devices of NVIDIA H200 (4xh200)" in said
    assert "cfp show --python needs none" in said
    assert "XLA_FLAGS" not in said


def test_a_preset_by_name_has_its_estimates_too(ahead, folder):
    where = {"mesh": cfp.described("4xh200"), "cache_dir": folder}
    made = cfp.plan(
        step, *arguments(), preset="zero1", donate_argnums=0, quiet=True, **where
    )
    [row] = [row for row in ahead.race if row.name == "zero1"]
    assert made.predicted_ms == pytest.approx(row.predicted_ms)
    assert made.predicted_bytes == row.peak_bytes == made.race[0].peak_bytes
    assert f"{row.predicted_ms:.3f} ms estimated" in repr(made)
    assert "nothing fits" not in repr(made)
    assert "chosen: the given preset; nothing was run or compiled" in repr(made)


def test_a_batch_that_the_devices_do_not_divide_is_said(ahead, folder):
    where = {"mesh": cfp.described("4xh200"), "cache_dir": folder}
    how = {**where, "preset": "data_parallel"}
    with pytest.warns(UserWarning, match=r"does not divide x \(66 over x=4\)") as seen:
        found = cfp.plan(step, *arguments(66), **how)
    assert len(seen) == 1 and seen[0].filename == __file__
    text = " ".join(repr(found).split())
    assert "whole, since the mesh does not divide them: x (66 over x=4)" in text
    assert "x (66 over x=4); a batch of 64 or 68 would be divided" in text
    assert "do not divide the batch" not in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.warns(UserWarning, match="does not divide x"):
            cfp.plan(step, *arguments(66), quiet=True, **how)  # Hides progress alone.
    # All leaves of the batch, also a mask that no product reads.
    batch = {"x": arguments(66)[1], "mask": jax.ShapeDtypeStruct((66,), "float32")}
    both = r"batch/mask \(66 over x=4\), batch/x \(66 over x=4\)"
    with pytest.warns(UserWarning, match=both):
        cfp.plan(masked_step, arguments(66)[0], batch, **how)
    # Four hosts divide it, and all devices do not.
    where["mesh"] = cfp.described("4x2xh100")
    found = cfp.plan(step, *arguments(68), preset="hsdp", **where)
    assert (
        "8 devices do not divide the batch of 68: some repeat work; a batch of 64 or "
        "72 would be divided"
    ) in [*remarks(found)]
    split = cfp.plan(step, *arguments(68), preset="tensor_parallel", **where)
    assert "do not divide" not in repr(split), "its axes shard no batch"
    assert not found.uneven and "do not divide the batch" not in repr(ahead)


def test_tokens_may_be_sharded_in_place_of_the_batch(folder):
    """No device repeats work, though the devices do not divide the sequences."""

    def step(params, x):
        def loss(params):
            h = x
            for _ in range(2):
                h = h + jnp.tanh(h @ params["up"]) @ params["down"]
            return jnp.mean(h**2)

        return jax.grad(loss)(params)

    shapes = {"up": (1024, 4096), "down": (4096, 1024), "x": (3, 4096, 1024)}
    params = {n: jax.ShapeDtypeStruct(s, "bfloat16") for n, s in shapes.items()}
    where = {"mesh": cfp.described("4xh200"), "cache_dir": folder}
    found = cfp.plan(step, params, params.pop("x"), **where)
    roles = {(one.role, one.dim) for row in found.rows for one in row.strategy}
    assert roles == {("rows", 1)} and not found.uneven
    assert "do not divide" not in repr(found)


def accumulated(w, x):
    """Gradients of two microbatches, of consecutive rows."""

    def loss(w, x):
        for _ in range(16):
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def add(total, part):
        return total + jax.grad(loss)(w, part), None

    parts = x.reshape(2, -1, x.shape[1])
    return w - jax.lax.scan(add, jnp.zeros_like(w), parts)[0]


def warned_plan(rows, mesh, folder):
    """Returns a plan, its warnings and its remarks."""
    args = (jax.ShapeDtypeStruct(dims, "float32") for dims in [(256, 256), (rows, 256)])
    how = {"mesh": cfp.described(mesh), "cache_dir": folder, "quiet": True}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = cfp.plan(
            accumulated, *args, preset="data_parallel", donate_argnums=0, **how
        )
    return found, [str(one.message) for one in seen], [*remarks(found)]


@pytest.mark.parametrize(
    ("rows", "part", "others"),
    [(24, 12, "16 or 32"), (6, 3, "16"), (20, 10, "16 or 32")],
)
def test_microbatches_that_the_devices_do_not_divide_are_said(
    rows, part, others, folder
):
    """By the plan and by the warning, also where 8 devices divide the batch."""
    plan, [warning], said = warned_plan(rows, "8xh100", folder)
    name = f"x ({rows} in microbatches of {part} over x=8)"
    assert f"does not divide {name}. " in warning
    assert warning.endswith(f"Pad the rows, or choose a batch of {others}.")
    whole = f"stored whole, since the mesh does not divide them: {name}"
    if part == 12:  # Padded by a third.
        assert plan.winner == "data_parallel"
        assert f"{whole}; a batch of {others} would be divided" in said
        return
    assert plan.winner == "replicated" and whole in said
    assert (
        "nothing is sharded: 8 devices are no faster than one for this step, and do "
        f"not divide microbatches of {part}: use one, or a batch of {others}"
    ) in said
    [cost] = re.findall(r"while at .* costs ([0-9.]+) ms by estimate", "".join(said))
    assert 0.1 < float(cost) <= plan.predicted_ms * 7 / 8 + 0.005, "rounded"


@pytest.mark.parametrize("rows", [16, 32])
def test_microbatches_that_the_devices_divide_are_not_said(rows, folder):
    plan, warned, said = warned_plan(rows, "8xh100", folder)
    assert plan.winner == "data_parallel" and not warned
    assert "divide" not in "".join(said) and not plan.uneven


def test_what_only_compiled_has_not_raced(ahead):
    made = replace(ahead, search={"race_seconds": 5.0, "planning_seconds": 9.0})
    assert "compiling 5.0 s, other 4.0 s; 9.0 s in all" in plan_text(made, width=200)


def test_estimates_below_a_millisecond_are_said_to_be_too_low(ahead):
    for ms, said in ((0.4, True), (4.0, False), (None, False)):
        text = " ".join(repr(replace(ahead, predicted_ms=ms)).split())
        assert ("estimates, and below 1 ms too low, since launches" in text) == said


def test_a_budget_holds_by_estimate(folder):
    mesh = cfp.described("4xh200")
    with pytest.raises(MemoryBudgetError):
        cfp.plan(
            step, *arguments(), mesh=mesh, memory_budget="134.3MB", cache_dir=folder
        )


def test_a_budget_is_said_of_the_memory_in_a_file(folder, tmp_path):
    """And not of the memory of the shipped kind that the file begins from."""
    file = tmp_path / "own.toml"
    file.write_text('kind = "h200"\nmemory_gib = 4\ndevices_per_host = 4\n')
    where = {"mesh": cfp.described(str(file)), "cache_dir": folder}
    found = repr(cfp.plan(step, *arguments(), preset="data_parallel", **where))
    said = "a plan may use 3.00 GiB of the 4.00 GiB of each device, JAX's default share"
    assert said in " ".join(found.split())
    how = {"preset": "data_parallel", "memory_budget": "9GiB", **where}
    found = repr(cfp.plan(step, *arguments(), **how))
    said = "a plan may use 8.88 GiB, more than the 4.00 GiB of each device: the budget"
    assert said in " ".join(found.split())


def test_a_preset_that_does_not_fit_says_so_first(folder):
    how = {"mesh": cfp.described("4xh200"), "cache_dir": folder}
    made = cfp.plan(step, *arguments(), preset="data_parallel", **how)
    assert made.figures.budget_bytes == int(0.75 * 141 * 2**30)
    small = cfp.plan(
        step, *arguments(), preset="data_parallel", memory_budget="130MiB", **how
    )
    assert small.predicted_bytes == made.predicted_bytes > 3 * 2**20
    assert small.figures.budget_bytes == 2 * 2**20  # the allocator's 128 MiB less
    said = format_bytes(small.predicted_bytes, up=True)
    times = f"{small.predicted_ms:.3f} ms estimated"
    verdict = f"does not fit: needs {said} of 2.00 MiB on each device, estimated"
    loaded = cfp.Plan.from_json(json.loads(small.to_json()))
    for text in (repr(loaded), plan_text(loaded, width=200)):
        assert f"{verdict}; {times}" in " ".join(text.split())[:300]
    # What XLA has compiled counts.
    compiled = replace(small, peak_bytes=2**20)
    fits = f"fits in 1.00 MiB of 2.00 MiB on each device, compiled; {times}"
    assert fits in " ".join(repr(compiled).split())


def test_a_preset_by_name_has_the_kernels_that_the_search_gives_it(folder):
    """A search takes chunked attention on TPUs, too, if memory is short."""
    words = "--layers 1 --hidden 256 --heads 2 --ffn 256 --seq 4096 --vocab 256"
    target = resolve("llama", [*words.split(), "--batch=64"])
    how = {"mesh": cfp.described("v5e-8"), "donate_argnums": target.donate}
    how |= {"memory_budget": "2GiB", "cache_dir": folder, "quiet": True}
    found = cfp.plan(target.step, *target.args, **how)
    [row] = [row for row in found.race if row.name == "fully_sharded"]
    made = cfp.plan(target.step, *target.args, preset="fully_sharded", **how)
    assert {one.kernels for one in made.segments} == {(), (("attention", "chunked"),)}
    assert made.predicted_bytes == row.peak_bytes < 2**30
    assert made.predicted_ms == pytest.approx(row.predicted_ms)


def test_slow_links_change_what_is_chosen_between_hosts(folder):
    mesh = cfp.described("2x8xh100", x=2, y=8)
    found = cfp.plan(step, *arguments(4096), mesh=mesh, cache_dir=folder)
    assert found.environment["crosses_hosts"] == "x"
    assert "collectives between hosts (along x), estimated: " in repr(found)
    # All data parallel, gradients go from host to host.
    how = {"mesh": mesh, "cache_dir": folder, "preset": "data_parallel"}
    plain = cfp.plan(step, *arguments(4096), **how)
    across = [m for row in plain.rows for m in row.moves if "x" in m.axes]
    text = " ".join(repr(plain).split())
    assert across and f"{sum(m.time_ms for m in across):.3g} ms a step; " in text


@pytest.fixture(scope="module")
def sharded_within(folder):
    """Plans by two presets that shard all state, over all devices and within a host."""
    how = {"mesh": cfp.described("4x8xh100"), "cache_dir": folder, "donate_argnums": 0}
    names = "fully_sharded", "hsdp"
    return {n: cfp.plan(step, *arguments(4096), preset=n, **how) for n in names}


def test_sharded_within_hosts_only_sums_of_pieces_cross(sharded_within):
    sent = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 0)
    over = {"all-gather": ("y",), "reduce-scatter": ("y",), "all-reduce": ("x",)}
    for move in (m for row in sharded_within["hsdp"].rows for m in row.moves):
        if move.total_bytes > 64:  # The loss is summed, too.
            assert move.axes == over[move.kind]
            sent[move.kind] += move.total_bytes
    assert sent == {k: WEIGHTS // (8 if k == "all-reduce" else 1) for k in over}
    # A piece crosses from each of a host's devices.
    text = " ".join(repr(sharded_within["hsdp"]).split())
    assert f"hosts (along x), estimated: {format_bytes(WEIGHTS)} and" in text
    assert f"; within hosts: {format_bytes(4 * 2 * WEIGHTS)} and " in text
    text = " ".join(repr(sharded_within["fully_sharded"]).split())
    assert f"hosts (along x), estimated: {format_bytes(2 * WEIGHTS)} and" in text
    assert "; within hosts: 0 B and 0 ms a step" in text


def test_a_plan_that_shards_within_hosts_is_saved(sharded_within, folder):
    plan = sharded_within["hsdp"]
    assert {axis for axes in plan.arg_specs[0] for axis in axes} == {"y"}
    plan.save(folder / "within.json")
    loaded = cfp.Plan.from_json(json.loads((folder / "within.json").read_text()))
    modes = {one.storage for part in loaded.segments for one in part.parameters}
    assert modes == {Storage.INNER} and loaded.arg_specs == plan.arg_specs
    assert "sharded within each host, gathered before use" in plan_text(loaded, 200)


def test_it_is_a_candidate_and_has_all_of_the_state_on_each_host(folder):
    where = {"mesh": cfp.described("4x8xh100"), "cache_dir": folder}
    found = cfp.plan(step, *arguments(4096), donate_argnums=0, **where)
    rows = {row.name: row for row in found.race}
    every, within = rows["fully_sharded"], rows["hsdp"]
    assert found.predicted_ms == pytest.approx(min(r.predicted_ms for r in found.race))
    assert every.predicted_ms < within.predicted_ms < 1.5 * every.predicted_ms
    more = within.peak_bytes - every.peak_bytes
    # Parameters and their gradients, or what is gathered of them.
    assert WEIGHTS * (1 / 8 - 1 / 32) <= more <= 2 * WEIGHTS


@pytest.mark.parametrize("text", ["8xh100", "4x8xh100"])
def test_without_hosts_and_devices_within_it_is_another_name(folder, text):
    axes = {"x": 2, "y": 4} if text == "8xh100" else {"x": 32}
    mesh = cfp.described(text, **axes)
    with pytest.raises(CfpError, match="no axis within hosts") as caught:
        cfp.plan(step, *arguments(), mesh=mesh, preset="hsdp", cache_dir=folder)
    assert "Use 'fully_sharded'" in str(caught.value)
    found = cfp.plan(step, *arguments(), mesh=mesh, cache_dir=folder)
    assert "hsdp" not in {row.name for row in found.race}


@pytest.fixture(scope="module")
def verified(ahead, folder, mesh):
    flat = flatten_step(step, arguments(), donate_argnums=0)
    analyzed = analyze_step(flat, mesh)
    return verify(ahead, analyzed, cache_dir=folder), analyzed


def test_on_arrival_the_plan_its_rivals_and_the_presets_are_timed(verified, ahead):
    best, _ = verified
    names = [row.name for row in best.race]
    assert names[0] == ahead.winner and {"data_parallel", "fully_sharded"} <= {*names}
    data = verified_data(ahead, best)
    assert data["rung"] == "estimated" and data["measured_ms"] > 0
    assert data["measured_ms"] == best.race[0].time_ms >= data["fastest_ms"]


def test_propagated_presets_are_timed_as_in_a_race(verified):
    best, _ = verified
    [row] = [row for row in best.race if row.name.startswith("propagated")]
    assert row.name == "propagated, activations constrained" and row.time_ms > 0


def test_a_prediction_is_compared_with_times_of_devices_that_it_is_of(
    verified, ahead, folder
):
    best, analyzed = verified
    text = "\n".join(verified_text(ahead, best))
    assert verified_data(ahead, best)["off"] is None
    assert "not compared, since the prediction is for other devices" in text
    assert "off by" not in text
    made = replace(ahead, environment={**ahead.environment, "device_kind": "cpu"})
    best = verify(made, analyzed, cache_dir=folder)
    off = made.predicted_ms / best.race[0].time_ms - 1
    assert verified_data(made, best)["off"] == pytest.approx(off)
    assert f"off by {off:+.1%}" in "\n".join(verified_text(made, best))


@pytest.mark.parametrize("level", ConstraintLevel)
def test_a_plan_does_not_race_itself_under_another_name(verified, mesh, folder, level):
    _, analyzed = verified
    settings = DetailedSettings(race=False, constraint_levels=(level,))
    made = cfp.plan(
        step,
        *arguments(),
        mesh=mesh,
        preset="zero1",
        donate_argnums=0,
        settings=settings,
        cache_dir=folder,
    )
    mine = replace(cfp.Plan.from_json(json.loads(made.to_json())), winner="mine")
    found = verify(mine, analyzed, cache_dir=folder)
    names = sorted(row.name for row in found.race)
    assert "mine" in names and "zero1" not in names and "fully_sharded" in names
    assert len({*names}) == len(names)


def test_what_had_no_time_says_that_verifying_had_none(verified, ahead, tmp_path):
    """The times of planning are not this run's."""
    _, analyzed = verified
    made = replace(ahead, search={"planning_seconds": 51.1, "race_cached": 1.0})
    where = {"cache_dir": tmp_path, "seconds": 0.0}
    found = verify(made, analyzed, **where)
    assert found.search.keys() >= {"planning_seconds", VERIFIED}
    assert "race_cached" not in found.search
    assert f"{found.measured_ms:.3f} ms per step, measured;" in headline(found)
    late = [one for one in found.race if not one.samples_ms]
    assert {one.note for one in late} == {TOO_LATE}
    said = "\n".join(verified_text(made, found))
    assert f"{len(late)} other programs were not compiled: --seconds" in said
    again = replace(made, search={**made.search, VERIFIED: 1.0})
    assert "before it was verified: " in plan_text(again, width=200)
    assert "before it" not in plan_text(made, width=200)


def test_what_is_written_is_measured_and_the_fastest(verified, folder, mesh):
    best = verified[0]
    assert best.rung == "measured"
    times_ms = [row.time_ms for row in best.race]
    assert best.measured_ms == pytest.approx(min(times_ms)) and VERIFIED in best.search
    best.save(folder / "measured.json")
    loaded = cfp.Plan.load(folder / "measured.json", mesh=mesh)
    params = {n: jnp.full(s, 0.01, jnp.float32) for n, s in SHAPES.items()}
    x = jnp.ones((64, 256))
    expected = step(params, x)[1]
    assert float(loaded.apply(step)(params, x)[1]) == pytest.approx(
        float(expected), rel=1e-4
    )


def test_other_devices_than_planned_for_have_one_clear_message(ahead, folder, mesh):
    ahead.save(folder / "plan.json")
    with pytest.raises(PlanMismatch) as caught:
        cfp.Plan.load(folder / "plan.json", mesh=mesh)
    assert str(caught.value).startswith(
        "The plan is for 4 devices of NVIDIA H200 (4xh200), and these are 4 of cpu. "
    )
    assert "plan.on(mesh, other_devices=True)" in str(caught.value)
    # Another kind of device is named before other axes.
    with pytest.raises(PlanMismatch, match=r"\(4xh200\), and these are 2 of cpu"):
        ahead.on(jax.make_mesh((2,), ("y",), devices=jax.devices()[:2]))
    replace(ahead, environment={}).on(mesh)
    # A measured plan is held to its devices alike.
    measured = replace(ahead, environment={"device_kind": "NVIDIA H200"})
    with pytest.raises(
        PlanMismatch, match=r"for 4 devices of NVIDIA H200, and these are 4"
    ):
        measured.bind(step, *arguments(), mesh=mesh)


def test_a_plan_is_loaded_for_a_described_mesh(ahead, folder):
    ahead.save(folder / "plan.json")
    loaded = cfp.Plan.load(folder / "plan.json", mesh=cfp.described("4xh200"))
    assert loaded == ahead and loaded.mesh is None
    for text, differ in (
        ("4xh100", "4 of NVIDIA H100"),
        ("8xh200", "x=4, got x=8"),
    ):
        with pytest.raises(PlanMismatch, match=differ):
            cfp.Plan.load(folder / "plan.json", mesh=cfp.described(text))


def test_a_plan_of_another_jax_is_refused_before_its_program_is_read(ahead, mesh):
    where = {"device_kind": "cpu", "platform": "cpu", "jax_version": "0.9.1"}
    other = replace(ahead, environment=where)
    text = (
        rf"is for JAX 0\.9\.1, and this is JAX {re.escape(jax.__version__)}\. Install"
    )
    for use in (lambda: other.on(mesh), lambda: other.bind(print, mesh=mesh)):
        with pytest.raises(PlanMismatch, match=text) as caught:
            use()
        assert "or plan again; to try the plan here all the same" in str(caught.value)
    assert other.on(mesh, other_devices=True).mesh is mesh


def test_on_other_devices_no_run_is_given_up(verified, ahead, tmp_path, monkeypatch):
    _, analyzed = verified
    limits = []

    def race(builder, programs, rounds):
        limits.append(builder.context.measure.limits.run_seconds)
        raise CfpError("seen")

    monkeypatch.setattr(sys.modules[verify.__module__], "race_programs", race)
    here = {**ahead.environment, "device_kind": "cpu"}
    for made in (ahead, replace(ahead, environment=here)):
        with pytest.raises(CfpError, match="seen"):
            verify(made, analyzed, cache_dir=tmp_path)
    assert limits == [float("inf"), 60.0]


def test_another_step_has_one_clear_message(verified, ahead):
    _, analyzed = verified
    other = replace(ahead, fingerprint="0" * 64)
    with pytest.raises(PlanMismatch, match="not the one that was planned"):
        verify(other, analyzed)
