"""Plans with kernels in the place of attentions: searched, raced, saved and applied."""

import json
import re
from dataclasses import replace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.presets import presets
from cfp.checking.check import Check, both_sides
from cfp.checking.verify import verify
from cfp.context import DetailedSettings, open_context
from cfp.kernels import chunked
from cfp.kernels.functions import Way
from cfp.kernels.matches import AttentionProposal, find, refusal_of
from cfp.kernels.problem import AttentionProblem
from cfp.passes import analyze_step, measured_rates
from cfp.profiling.hlo import collectives_in
from cfp.program.step import flatten_step
from cfp.race.programs import RaceOutcome
from cfp.search.guided import Candidate, Solution
from cfp.search.requests import constraints_of
from cfp.settings import ConstraintLevel, Replacing
from cfp.view.evidence import with_figures
from cfp.view.text import explain_text
from cfp_test.programs.common import normal
from cfp_test.support.checking import make_mesh
from cfp_test.support.golden import plan_text

pytestmark = pytest.mark.usefixtures("compiled_once")

TOKENS, HEADS, HEAD_DIM, CHUNK = 192, 4, 8, 32
HIDDEN = HEADS * HEAD_DIM
SETTINGS = {"per_kind": 2, "in_context": False}


def loss(params, x):
    q, k, v = (jnp.einsum("bsh,hnd->bsnd", x, params[name]) for name in ("q", "k", "v"))
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) * HEAD_DIM**-0.5
    seen = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    mixed = jnp.einsum("bnqk,bknd->bqnd", weights, v)
    return jnp.square(jnp.einsum("bqnd,ndh->bqh", mixed, params["out"]) - x).mean()


def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments():
    shapes = {name: (HIDDEN, HEADS, HEAD_DIM) for name in ("q", "k", "v")}
    shapes["out"] = (HEADS, HEAD_DIM, HIDDEN)
    params = {
        name: 0.2 * normal(seed, *shape)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    return params, normal(9, 4, TOKENS, HIDDEN)


@pytest.fixture(scope="module", autouse=True)
def short_chunks():
    with patch.object(chunked, "CHUNK", CHUNK):
        yield


@pytest.fixture(scope="module")
def planned(mesh, tmp_path_factory):
    """A plan for less memory than any plan for the step as it is written needs."""
    folder = tmp_path_factory.mktemp("store")

    def plan(budget, *kernels):
        return cfp.plan(
            step,
            *arguments(),
            mesh=mesh,
            memory_budget=budget,
            cache_dir=folder,
            settings=DetailedSettings(kernels=kernels, **SETTINGS),
        )

    with pytest.raises(cfp.MemoryBudgetError) as caught:
        plan(2000)
    less = caught.value.smallest_feasible_bytes * 9 // 10
    with pytest.raises(cfp.MemoryBudgetError):
        plan(less)
    return plan(less, "chunked"), less


def assert_same(found):
    expected = jax.jit(step)(*arguments())
    worst = cfp.compare(found, expected)[0]
    assert worst.relative_l2 < 1e-5, worst


@pytest.mark.smoke
def test_a_plan_with_a_kernel_wins_where_nothing_else_fits(planned):
    plan, budget = planned
    assert plan.peak_bytes <= budget
    [how] = {one.functions.how for one in plan.constraints.replaced}
    assert how[0] == "chunked"
    [row] = [row for row in plan.race if row.name == plan.winner]
    assert row.note.startswith("compiled") and row.peak_bytes == plan.peak_bytes
    assert "chunked attention" in repr(plan)
    assert_same(plan.apply(step)(*arguments()))


def test_it_is_the_same_behind_its_file(planned, mesh, tmp_path):
    plan, _ = planned
    plan.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh)
    applied = loaded.apply(step)
    assert_same(applied(*arguments()))


def test_a_file_is_verified_with_its_kernels(planned, mesh, tmp_path):
    """As written the step needs more memory than the plan's budget."""
    plan, _ = planned
    plan.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh)
    analyzed = analyze_step(flatten_step(step, arguments()), mesh)
    found = verify(loaded, analyzed, cache_dir=tmp_path, seconds=0.0)
    [own] = (row for row in found.race if row.time_ms is not None)
    assert own.name == plan.winner
    assert own.peak_bytes == plan.peak_bytes


def test_an_export_computes_by_its_kernels(planned, mesh, tmp_path):
    plan, _ = planned
    plan.save(tmp_path / "plan.json")
    bound = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh).bind(step, *arguments())
    bound.export(tmp_path / "step.jax")
    data = bytearray((tmp_path / "step.jax").read_bytes())
    exported = jax.export.deserialize(data)
    where = [*exported.in_shardings_jax(bound.mesh)]
    leaves = jax.device_put(jax.tree.leaves(arguments()), where)
    run = jax.jit(exported.call).lower(*leaves).compile()
    ours = plan.compile(step, *arguments())
    assert collectives_in(run.as_text()) == collectives_in(ours.as_text())
    assert squares_in(run.as_text()) == []
    wanted = jax.tree.leaves(ours(*arguments()))
    assert all((a == b).all() for a, b in zip(run(*leaves), wanted, strict=True))


def squares(plan):
    """Shapes with two dims of all tokens, in the program that a plan compiles to."""
    return squares_in(plan.compile(step, *arguments()).as_text())


def squares_in(text):
    shapes = set(re.findall(r"\w\d+\[([\d,]+)\]", text))
    return [one for one in shapes if one.split(",").count(str(TOKENS)) > 1]


def test_no_scores_are_left_in_what_it_compiles_to(planned, mesh, tmp_path):
    plan, _ = planned
    assert squares(plan) == []
    # The same search finds them in a plan that leaves the attention as it is written.
    settings = DetailedSettings(race=False, **SETTINGS)
    how = {"preset": "data_parallel", "cache_dir": tmp_path, "settings": settings}
    assert squares(cfp.plan(step, *arguments(), mesh=mesh, **how)) != []


def test_attentions_that_are_left_alone_are_listed_with_the_reason(mesh, tmp_path):
    def double(params, x):
        """One of two attentions has weights that do not add up to one."""

        def loss(params):
            q, k, v = (
                jnp.einsum("bsh,hnd->bsnd", x, params[name]) for name in ("q", "k", "v")
            )
            scores = jnp.einsum("bqnd,bknd->bnqk", q, k)
            leaked = jnp.exp(scores) / (1 + jnp.exp(scores).sum(-1, keepdims=True))
            mixed = jnp.einsum("bnqk,bknd->bqnd", leaked, v)
            weights = jax.nn.softmax(jnp.einsum("bqnd,bknd->bnqk", mixed, k))
            return jnp.square(jnp.einsum("bnqk,bknd->bqnd", weights, v) - q).mean()

        return jax.grad(loss)(params)

    params, x = arguments()
    settings = DetailedSettings(kernels=("chunked",), race=False, **SETTINGS)
    how = {"mesh": mesh, "cache_dir": tmp_path, "settings": settings}
    plan = cfp.plan(double, params, x[:, :16], **how)
    shown = " ".join(explain_text(plan).split())
    why = "its output is not that of a softmax of scaled scores"
    assert f"{why} (test_plans.py:" in shown
    loaded = cfp.Plan.from_json(json.loads(plan.to_json()))
    assert loaded.figures.left == plan.figures.left != ()
    left = [one for one in loaded.figures.left if not one.kernel]
    assert [one.count for one in left] == [1] * len(left)
    # Nothing is looked for, and said, where no kernel may be used.
    plain = cfp.plan(double, params, x[:, :16], mesh=mesh, cache_dir=tmp_path)
    assert plain.figures.left == ()


def test_a_check_of_it_passes(planned):
    plan, _ = planned
    check = Check(*both_sides(plan), {0: 0})
    check.start(arguments())
    for _ in range(2):
        assert check.step().failures == []


def test_on_virtual_devices_kernels_are_for_memory(mesh, tmp_path):
    """XLA's own attention stays if times decide: it is the fastest on a CPU."""
    with open_context(mesh, tmp_path) as context:
        assert context.defaults.replacing == Replacing()
        assert context.defaults.replacing_for_memory.kernels == ("chunked",)
    for asked in (("xla",), ()):
        settings = cfp.PlannerSettings(kernels=asked)
        with open_context(mesh, tmp_path, None, settings) as context:
            assert context.defaults.replacing == Replacing(kernels=asked)
            assert context.defaults.replacing_for_memory == context.defaults.replacing


def half(params, x):
    """The step, computed in bfloat16."""

    def rounded(params):
        return loss(*jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x)))

    value, gradients = jax.value_and_grad(rounded)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def on_described(step, folder, preset=None, **settings):
    how = {"cache_dir": folder, "settings": DetailedSettings(**settings)}
    where = {"mesh": cfp.described("4xh200"), "preset": preset}
    return cfp.plan(step, *arguments(), **where, **how)


def test_on_gpus_what_computes_the_same_in_the_same_dtype_is_the_default(
    mesh, tmp_path
):
    plan = on_described(half, tmp_path)
    assert {one.functions.how[0] for one in plan.constraints.replaced} == {"cudnn"}
    line = "Replaced, in the same dtypes: 1 attention by cudnn; as written by"
    assert f"{line} --kernels none" in plan_text(plan, width=200)
    assert "PlannerSettings(kernels=())" in " ".join(repr(plan).split())
    assert plan.predicted_ms < on_described(half, tmp_path, kernels=()).predicted_ms
    with pytest.raises(cfp.PlanMismatch, match="without kernels: cfp plan --kernels"):
        plan.on(mesh, other_devices=True).compile(half, *arguments())


def test_a_preset_has_kernels_where_these_may_be_used(tmp_path):
    plan = on_described(half, tmp_path, "fully_sharded")
    assert plan.winner == "fully_sharded"
    assert {one.functions.how[0] for one in plan.constraints.replaced} == {"cudnn"}
    line = "Replaced, in the same dtypes: 1 attention by cudnn; as written by"
    assert f"{line} --kernels none" in plan_text(plan, width=200)
    for kept in ({"kernels": ()}, {"choose": ("sharding", "storage")}):
        plan = on_described(half, tmp_path, "fully_sharded", **kept)
        assert not plan.constraints.replaced
    plan = on_described(step, tmp_path, "fully_sharded")
    assert not plan.constraints.replaced
    assert "Attention not by cudnn: it computes in float16" in plan_text(plan, 200)


def raced(mesh, folder, batches, **settings):
    """A preset whose attention chunks may compute.

    Args:
        batches: sequences of four; what was lowered for as many is remembered.
    """
    settings = DetailedSettings(kernels=("chunked",), measure=True, **settings)
    how = {"preset": "data_parallel", "cache_dir": folder, "settings": settings}
    params, x = arguments()
    return cfp.plan(half, params, jnp.tile(x, (batches, 1, 1)), mesh=mesh, **how)


def test_a_preset_races_with_kernels_and_as_written(mesh, tmp_path):
    names = {"data_parallel", "data_parallel (as written)"}
    plan = raced(mesh, tmp_path, 2)
    assert {row.name for row in plan.race if row.time_ms is not None} == names
    free = raced(mesh, tmp_path, 2, race=False)
    assert free.winner == "data_parallel" and not free.constraints.replaced

    def refuse(*args, **kwargs):
        raise RuntimeError("cuDNN is not detected.")

    with patch.object(chunked, "attend", refuse):
        plan = raced(mesh, tmp_path, 3)
    assert plan.winner == "data_parallel (as written)"
    assert not plan.constraints.replaced
    [failed] = [row for row in plan.race if row.name == "data_parallel"]
    assert "cuDNN is not detected" in failed.note
    text = plan_text(plan, width=200)
    assert "Attention as written: chunked failed: " in text
    assert "cuDNN is not detected" in text


def test_a_preset_fits_by_a_kernel_that_is_slower_by_estimate(mesh, tmp_path):
    """It is the slower one: the preset as written comes first, if it fits."""

    def plan(budget=None, **settings):
        settings = DetailedSettings(kernels=("chunked",), **settings)
        how = {"preset": "data_parallel", "cache_dir": tmp_path, "settings": settings}
        how |= {"mesh": mesh, "memory_budget": budget}
        return cfp.plan(step, *arguments(), **how)

    free = plan()
    assert free.winner == "data_parallel (as written)"
    assert not free.constraints.replaced
    times = {row.name: row.predicted_ms for row in free.race}
    assert times["data_parallel"] > times[free.winner]
    less = free.peak_bytes * 9 // 10
    # With rates in the store, a race too knows that the kernel is slower.
    with open_context(mesh, tmp_path) as context:
        assert measured_rates(context)
    for measure in (None, True):
        fitting = plan(less, measure=measure)
        assert fitting.winner == "data_parallel" and fitting.peak_bytes <= less
        [how] = {one.functions.how for one in fitting.constraints.replaced}
        assert how[0] == "chunked"


def test_by_default_no_precision_is_lost(tmp_path):
    """No kernel for float32 computes in float32 and is faster; none is for float64."""
    plan = on_described(step, tmp_path)
    assert not plan.constraints.replaced
    with jax.enable_x64(True):
        problem = AttentionProblem(
            batch=1,
            queries=8,
            keys=8,
            heads=1,
            kv_heads=1,
            head_dim=8,
            dtype="float64",
            scale=1.0,
        )
        reason = refusal_of(problem, Way("chunked"), {}, "cpu")
    assert reason and reason.endswith("at most, and the attention is in float64")


@pytest.mark.parametrize("precision", ["highest", "default"])
def test_products_keep_the_precision_that_was_asked_for(mesh, precision):
    def asked(params, x):
        with jax.default_matmul_precision(precision):
            return step(params, x)

    program = analyze_step(
        flatten_step(asked, arguments()), mesh
    ).analysis.frame.program
    [match] = find(program).found.values()
    for one in AttentionProposal(match, Way("chunked")).replacements(program):
        function = one.functions.stages(mesh)[0]
        shapes = [
            jax.ShapeDtypeStruct(s, d)
            for s, d, _ in one.functions.passes[0].reads  # pyright: ignore
        ]
        text = jax.jit(function).lower(*shapes).as_text()
        assert text.count("precision = [HIGHEST, HIGHEST]") == (
            text.count("stablehlo.dot_general") if precision == "highest" else 0
        )


def ahead(folder, *kernels):
    """A plan for described GPUs, where cuDNN computes but what it cannot."""
    settings = cfp.PlannerSettings(kernels=kernels)
    how = {"cache_dir": folder, "settings": settings}
    return cfp.plan(step, *arguments(), mesh=cfp.described("4xh200"), **how)


def test_kernels_that_cannot_are_told_with_the_reason(tmp_path):
    why = (
        "it computes in float16 and bfloat16, not in float32; to use it, cast q, k "
        "and v to bfloat16"
    )
    plan = ahead(tmp_path, "cudnn", "chunked")
    assert {one.functions.how[0] for one in plan.constraints.replaced} == {"chunked"}
    told = " ".join(explain_text(plan).split())
    assert re.search(rf"Attention not by cudnn: {why} \(test_plans\.py:", told)
    assert f"Attention not by cudnn: {why}" in plan_text(plan, width=200)
    loaded = cfp.Plan.from_json(json.loads(plan.to_json()))
    assert loaded.figures.left == plan.figures.left
    [left] = [one for one in loaded.figures.left if one.kernel]
    assert (left.kernel, left.reason, left.count) == ("cudnn", why, 1)
    # What was preferred, and computes it, says nothing of the others.
    others = ahead(tmp_path, "chunked", "cudnn").figures.left
    assert not any(one.kernel for one in others)


@pytest.mark.explained("Attention as written")
def test_a_kernel_that_could_and_was_not_chosen_is_named(planned, mesh):
    analysis = analyze_step(flatten_step(step, arguments()), mesh).analysis
    assert find(analysis.frame.program).found
    choice = presets(analysis.frame)["data_parallel"]
    kernels = Replacing(kernels=("cudnn", "chunked", "xla"), platform="cpu")
    outcome = RaceOutcome(solution=Solution(()), winner=Candidate("planned", choice))
    told = with_figures(planned[0], analysis, outcome, kernels)
    why = "chunked or xla can compute it; nothing was searched for this plan"
    left = {one.kernel: one.reason for one in told.figures.left}
    assert left.keys() == {"", "cudnn"} and left[""] == why
    assert f"Attention as written: {why}" in plan_text(told, width=200)
    assert f"attention as written: {why}" in " ".join(repr(told).split())


def test_memory_is_estimated_as_a_kernel_needs_it(tmp_path):
    """XLA's attention keeps its scores, and a chunk holds those of its own."""

    def planned(*kernels, chunk=CHUNK):
        with patch.object(chunked, "CHUNK", chunk):
            return cfp.plan(
                step,
                *arguments(),
                mesh=cfp.described("4xh200"),
                cache_dir=tmp_path,
                settings=cfp.PlannerSettings(kernels=kernels),
            )

    plain, xla = planned(), planned("xla")
    assert not plain.constraints.replaced and xla.constraints.replaced
    assert xla.predicted_bytes >= 0.9 * plain.predicted_bytes
    small, whole = planned("chunked"), planned("chunked", chunk=TOKENS)
    assert small.constraints.replaced and whole.constraints.replaced
    scores = 4 * HEADS * TOKENS * TOKENS * 4 // 4  # Four sequences on four devices.
    assert whole.predicted_bytes - small.predicted_bytes > scores
    assert small.predicted_bytes < plain.predicted_bytes / 2


@pytest.mark.parametrize("level", ConstraintLevel)
def test_the_reads_of_a_kernel_are_not_constrained(level):
    """A product that sums groups of heads is held, until a kernel replaces it."""

    def mixed(q, k, v):
        scores = jnp.einsum("bqngd,bknd->bngqk", q, k)
        out = jnp.einsum("bngqk,bknd->bqngd", jax.nn.softmax(scores), v)
        return jnp.square(out).sum()

    q, k = normal(0, 4, 16, 4, 2, 8), normal(1, 4, 16, 4, 8)
    step = flatten_step(jax.grad(mixed, (0, 1, 2)), (q, k, k))
    analysis = analyze_step(step, make_mesh((("x", 2), ("y", 2)))).analysis
    kernels = [(one.index, (("attention", "xla"),)) for one in analysis.segments]
    choice = replace(presets(analysis.frame)["data_parallel"], kernels=tuple(kernels))
    found = constraints_of(analysis, choice, level)
    read = {use for one in found.replaced for s in one.stages for use in s.reads}
    assert any(analysis.frame.program.ops[op].rule.held for op, _ in read)
    assert found.uses.keys().isdisjoint(read)
