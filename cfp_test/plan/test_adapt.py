"""Plans carried over to more layers, or to another batch size."""

import itertools
import json
import random
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cfp
from cfp.analysis.layout import Choice, SegmentKernels, Storage
from cfp.analysis.strategies import block_strategies
from cfp.models import build
from cfp.passes.pipeline import analyze_step
from cfp.plan.compose import compose_plan
from cfp.presets.presets import presets
from cfp.profiling.hlo import collectives_in
from cfp.program.step import flatten_step
from cfp.race.programs import RaceOutcome
from cfp.settings import ConstraintLevel
from cfp.solution import Candidate
from cfp.view.text import diff_data, explain_text
from cfp.view.words import moves_text
from cfp_test.cli.cli_runner import run_batch
from cfp_test.models.tiny import TINY
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night, cover_values

STEP = """
import jax
import jax.numpy as jnp


def loss(params, x):
    for layer in params["layers"]:
        with jax.named_scope("layer"):
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return ((x @ params["head"]) ** 2).mean()


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(layers, batch=16, width=16, dtype="float32"):
    def make(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = {"up": make(width, 64), "down": make(64, width)}
    return {"layers": [layer] * layers, "head": make(width, 32)}, make(batch, width)


def deep():
    return step, arguments(5)


def scanned_loss(params, x):
    def body(x, layer):
        return x + jnp.tanh(x @ layer["up"]) @ layer["down"], None

    x, _ = jax.lax.scan(body, x, params["layers"])
    return ((x @ params["head"]) ** 2).mean()


def scanned_step(params, x):
    value, grads = jax.value_and_grad(scanned_loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def scanned(iterations, batch=16):
    def make(*shape):
        return jax.ShapeDtypeStruct(shape, "float32")

    layers = {"up": make(iterations, 16, 64), "down": make(iterations, 64, 16)}
    return {"layers": layers, "head": make(16, 32)}, make(batch, 16)
"""
TOY = {}
exec(STEP, TOY)  # also a file of its own, for the command line
STEP_FN, arguments = TOY["step"], TOY["arguments"]
SCANNED_STEP, scanned = TOY["scanned_step"], TOY["scanned"]
PRESETS = ("data_parallel", "zero1", "fully_sharded", "tensor_parallel")


@pytest.fixture(scope="module")
def how(tmp_path_factory):
    return {
        "mesh": make_mesh((("x", 4),)),
        "donate_argnums": 0,
        "settings": cfp.PlannerSettings(race=False),
        "cache_dir": tmp_path_factory.mktemp("cache"),
    }


@pytest.fixture(scope="module")
def saved(how):
    """Plans for three layers by name, as read from a file."""
    made = {
        name: cfp.plan(STEP_FN, *arguments(3), preset=name, **how) for name in PRESETS
    }
    return {
        name: cfp.Plan.from_json(json.loads(plan.to_json()), mesh=how["mesh"])
        for name, plan in made.items()
    }


def adapted(plan, *args, **more):
    return cfp.adapt(plan, STEP_FN, *args, donate_argnums=0, **more)


@cover_values(size=[(5, 16), (3, 32)], name=PRESETS)
def test_a_strategy_stays_the_same_strategy(saved, how, name, size):
    """A preset's choice for the other program is known without the plan."""
    args = arguments(*size)
    found = adapted(saved[name], *args)
    wanted = cfp.plan(STEP_FN, *args, preset=name, **how)
    assert found.fingerprint == wanted.fingerprint
    assert found.arg_specs == wanted.arg_specs
    assert found.output_specs == wanted.output_specs
    assert found.constraints == wanted.constraints
    assert found.donated == wanted.donated
    assert any(row.moves for row in found.rows)
    assert not diff_data(found, wanted)["collectives"]


def test_another_batch_differs_in_sizes_and_in_no_sharding(saved):
    plan = saved["data_parallel"]
    other = adapted(plan, *arguments(3, batch=32))
    found = diff_data(plan, other)
    assert found["sizes"] == {"x": ("float32[16,16]", "float32[32,16]")}
    assert not found["arguments"] and not found["blocks"]
    assert all(None not in pair for pair in found["collectives"].values())
    assert not diff_data(plan, adapted(plan, *arguments(3)))["collectives"]
    shown = explain_text(other)
    assert "why: carried over from the plan of another program" in shown
    assert "asked for by name" not in shown and "no limit" not in shown


def test_it_says_that_it_is_not_measured(saved):
    plan = replace(saved["zero1"], measured_ms=5.0, predicted_ms=4.0)
    found = adapted(plan, *arguments(5))
    assert found.rung == "estimated"
    assert found.search["adapted"] == 1.0
    assert found.measured_ms is None
    assert found.peak_bytes is None
    assert found.race == ()
    assert "carried over from the plan of another program" in repr(found)
    assert json.loads(found.to_json())["search"]["adapted"] == 1.0


def test_layers_take_as_long_as_they_took(saved):
    plan = saved["zero1"]
    segments = tuple(replace(one, time_ms=2.0) for one in plan.segments)
    timed = replace(plan, segments=segments, measured_ms=10.0)
    deeper = adapted(timed, *arguments(5))
    assert len(deeper.segments) > len(segments)
    more = 2.0 * (len(deeper.segments) - len(segments))
    assert deeper.predicted_ms == 10.0 + more
    assert adapted(timed, *arguments(3, 32)).predicted_ms is None


@pytest.fixture(scope="module")
def looped(how):
    """A plan for four layers in a scan, each of whose segments took 2 ms."""
    plan = cfp.plan(SCANNED_STEP, *scanned(4), preset="tensor_parallel", **how)
    plan = cfp.Plan.from_json(json.loads(plan.to_json()), mesh=how["mesh"])
    segments = tuple(replace(one, time_ms=2.0) for one in plan.segments)
    assert {row.repeats for row in plan.rows} == {1, 4}
    return replace(plan, segments=segments)


def iterated(plan, iterations, **sizes):
    return cfp.adapt(plan, SCANNED_STEP, *scanned(iterations, **sizes))


@pytest.mark.parametrize("iterations", [2, 4, 12])
def test_more_iterations_take_more_time(looped, iterations):
    """A loop of n iterations takes n times what one does, all else what it took."""
    loops = {row.segment for row in looped.rows if row.repeats == 4}
    more = 2.0 * len(loops) * (iterations / 4 - 1)
    [new] = {r.repeats for r in iterated(looped, iterations).rows if r.segment in loops}
    assert new == iterations
    for known, wanted in (
        ({"measured_ms": 10.0}, 10.0 + more),
        ({"predicted_ms": 8.0}, 8.0 + more),
        # The step took twice what was predicted for it.
        ({"measured_ms": 16.0, "predicted_ms": 8.0}, 2 * (8.0 + more)),
    ):
        found = iterated(replace(looped, **known), iterations)
        assert found.predicted_ms == pytest.approx(wanted)
        assert "and not measured: cfp verify times it" in repr(found)


@pytest.mark.parametrize("unknown", ["time", "parts", "batch", "estimates"])
def test_what_takes_unknown_time_has_no_number(looped, unknown):
    rows, segments = list(looped.rows), list(looped.segments)
    if unknown == "time":
        segments[0] = replace(segments[0], time_ms=None)
    elif unknown == "parts":  # of one segment, half of it in the loop
        place = next(i for i, row in enumerate(rows) if row.repeats == 4)
        rows[place] = replace(rows[place], repeats=1)
    search = {"strategies_estimated": 3.0} if unknown == "estimates" else {}
    plan = replace(looped, rows=tuple(rows), measured_ms=10.0, search=search)
    plan = replace(plan, segments=tuple(segments))
    sizes = {"batch": 32} if unknown == "batch" else {}
    found = iterated(plan, 4 if sizes else 12, **sizes)
    assert found.predicted_ms is None
    assert "and neither measured nor predicted: cfp verify" in repr(found)
    measured = replace(found, measured_ms=30.0, rung="measured")
    assert "not measured" not in repr(measured)
    assert "carried over from the plan of another program" in repr(measured)


def test_collectives_of_a_loop_are_counted_in_every_iteration(looped, how):
    """As the compiled program runs them: two more all-reduces for each layer."""

    def counts(iterations):
        args = scanned(iterations)
        plan = cfp.plan(SCANNED_STEP, *args, preset="tensor_parallel", **how)
        planned = sum(move.count for row in plan.rows for move in row.moves)
        text = plan.compile(SCANNED_STEP, *args).as_text()
        return planned, sum(one.count for one in collectives_in(text))

    (few, compiled), (many, more) = counts(3), counts(9)
    assert many - few == more - compiled > 0
    texts = [moves_text(row.moves) for row in looped.rows if row.repeats == 4]
    assert any("in each of 4 iterations" in text for text in texts)


def test_more_layers_train_as_plain_jit_does(saved, how):
    """With the same collectives for each layer more."""
    rng = np.random.default_rng(0)
    counts = []
    for layers in (4, 5, 6):
        args = jax.tree.map(
            lambda a: jnp.asarray(rng.normal(size=a.shape) / 8, a.dtype),
            arguments(layers),
        )
        plan = adapted(saved["tensor_parallel"], *args)
        run, (params, x) = plan.apply(STEP_FN), args
        plain, state = jax.jit(STEP_FN), jax.tree.map(jnp.copy, params)
        losses = []
        for _ in range(2):
            state, loss = run(state, x)
            params, wanted = plain(params, x)
            losses.append((float(loss), float(wanted)))
        np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)
        text = plan.compile(STEP_FN, *args).as_text()
        found = Counter()
        for one in collectives_in(text):
            found[one.kind, one.bytes] += one.count
        counts.append(found)
    more = counts[1] - counts[0]
    assert counts[2] - counts[1] == more
    assert more.total() > 0
    assert not counts[0] - counts[1]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (arguments(3, width=32), "is of another type"),
        (arguments(3, dtype="bfloat16"), "Segment 0 of the step is none of the plan"),
        (arguments(3, batch=18), "x would be sharded otherwise"),
        (
            ({"layers": [], "head": arguments(1)[0]["head"]}, arguments(1)[1]),
            "of the plan",
        ),
    ],
    ids=["wider", "type", "uneven", "no layers"],
)
def test_what_does_not_match_is_refused(saved, args, reason):
    with pytest.raises(cfp.PlanMismatch, match=reason):
        adapted(saved["tensor_parallel"], *args)
        adapted(saved["data_parallel"], *args)


def test_a_plan_of_one_segment_names_the_plan_that_more_layers_need(how):
    """In it no layer repeats."""
    params, x = arguments(1)
    one = cfp.plan(STEP_FN, params, x, preset="data_parallel", **how)
    assert len(one.segments) == 1
    with pytest.raises(cfp.PlanMismatch, match="The plan is of one segment") as error:
        adapted(one, *arguments(3))
    assert "a plan of 3 blocks in 1 segment, and a step of 7 blocks" in str(error.value)
    assert "try: cfp plan for three layers or more" in str(error.value)


def test_a_key_and_a_counter_in_the_state_stay_for_another_batch(how):
    def step(state, x):
        found, loss = STEP_FN(state["params"], x)
        key, noise = jax.random.split(state["key"])
        loss += jax.random.normal(noise)
        return {"params": found, "key": key, "count": state["count"] + 1}, loss

    def given(batch):
        params, x = arguments(2, batch)
        key = jax.eval_shape(jax.random.key, 0)
        return {"params": params, "key": key, "count": 0}, x

    made = cfp.plan(step, *given(16), preset="data_parallel", **how)
    loaded = cfp.Plan.from_json(json.loads(made.to_json()), mesh=how["mesh"])
    found = cfp.adapt(loaded, step, *given(32), donate_argnums=0)
    assert found.arg_specs == made.arg_specs
    assert "key<fry>[]" in found.arg_types


def test_a_plan_without_blocks_is_refused(saved):
    with pytest.raises(cfp.PlanMismatch, match="does not say what it does"):
        adapted(replace(saved["zero1"], rows=()), *arguments(5))


def test_a_plan_on_no_devices_takes_those_that_are_there(saved):
    loaded = replace(saved["zero1"], mesh=None)
    assert adapted(loaded, *arguments(5)).mesh == saved["zero1"].mesh
    elsewhere = replace(loaded, environment={"platform": "gpu"})
    with pytest.raises(cfp.PlanMismatch, match="no devices yet"):
        adapted(elsewhere, *arguments(5))


@pytest.mark.parametrize("name", ["zero1", "fully_sharded", "tensor_parallel"])
def test_another_number_of_devices_takes_the_same_choices(saved, name):
    """The same way to shard every argument, and of time nothing is said."""
    four, two = saved[name], jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    found = adapted(four, *arguments(5), mesh=two)
    again = adapted(four, *arguments(5))
    assert found.mesh_axes == (("x", 2),)
    assert found.arg_specs == again.arg_specs
    assert found.output_specs == again.output_specs
    assert found.constraints == again.constraints
    assert found.predicted_ms is None


def biased_loss(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["up_bias"])
    return ((hidden @ params["head"] + params["bias"]) ** 2).mean()


def biased_step(params, x):
    value, grads = jax.value_and_grad(biased_loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@cover_values(
    counts=[(4, 2), (2, 4), (2, 8), (8, 2)],
    name=["fully_sharded", "tensor_parallel", "tensor_sequence_parallel"],
)
def test_what_one_of_two_numbers_of_devices_divides_is_whole_on_the_other(
    how, counts, name
):
    """A bias of 10, which two devices divide; the step stays one device's."""
    rng = np.random.default_rng(0)
    shapes = {"up": (16, 64), "up_bias": (64,), "head": (64, 10), "bias": (10,)}
    params = {
        key: jnp.asarray(rng.normal(size=shape) / 8, "float32")
        for key, shape in shapes.items()
    }
    x = jnp.asarray(rng.normal(size=(16, 16)), "float32")
    old, new = (make_mesh((("x", count),)) for count in counts)
    more = {"cache_dir": how["cache_dir"], "settings": how["settings"]}
    if (counts, name) == ((8, 2), "tensor_sequence_parallel"):
        name = "zero1"  # there is no such preset for eight
    plan = cfp.plan(biased_step, params, x, preset=name, mesh=old, **more)
    found = cfp.adapt(plan, biased_step, params, x, mesh=new)
    was, spec = (
        dict(zip(one.arg_names, one.arg_specs, strict=True))["params/bias"]
        for one in (plan, found)
    )
    assert new.size == 2 or spec == ((),)
    if was != spec and counts[0] == 2:
        assert f"params/bias (10 over x={new.size})" in found.uneven
    elif name == "tensor_sequence_parallel" or (name, new.size) == ("fully_sharded", 2):
        assert was != spec
    got = found.apply(biased_step)(params, x)
    wanted = jax.jit(biased_step)(params, x)
    for one, other in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_command_takes_another_number_of_devices(saved, tmp_path):
    (tmp_path / "toy.py").write_text(STEP)
    saved["zero1"].save(tmp_path / "plan.json")
    words = "plan toy.py:deep --donate 0 --adapt plan.json --mesh".split()
    two, other = run_batch(
        [[*words, "x=2", "-o", "two.json"], [*words, "data=2"]], tmp_path
    )
    assert two.code == 0, two.err
    assert cfp.Plan.load(tmp_path / "two.json").mesh_axes == (("x", 2),)
    assert other.code == 2 and "axes of the same names" in other.err


def test_axes_of_other_names_are_refused(saved):
    two = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    with pytest.raises(cfp.PlanMismatch, match="axes of the same names"):
        adapted(saved["zero1"], *arguments(5), mesh=two)


@pytest.mark.parametrize(("name", "is_advised"), [("x", True), ("data", False)])
def test_a_plan_for_another_mesh_advises_what_works(saved, name, is_advised):
    two = jax.make_mesh((2,), (name,), devices=jax.devices()[:2])
    with pytest.raises(cfp.PlanMismatch, match="The plan is for") as caught:
        saved["zero1"].on(two)
    assert ("cfp.adapt(plan, step" in str(caught.value)) == is_advised
    assert ("axes of the same names" in str(caught.value)) == (not is_advised)


def test_an_argument_that_was_pinned_is_not_forgotten(saved):
    """It is kept where storage explains it, and refused where nothing does."""
    plan = saved["data_parallel"]
    specs, head = list(plan.arg_specs), plan.arg_names.index("params/head")
    specs[head] = (("x",), ())
    found = adapted(replace(plan, arg_specs=tuple(specs)), *arguments(5))
    assert found.arg_specs[found.arg_names.index("params/head")] == specs[head]
    specs[head] = ((), ("x",))
    found = adapted(replace(plan, arg_specs=tuple(specs)), *arguments(5))
    assert found.arg_specs[found.arg_names.index("params/head")] == specs[head]
    specs = list(plan.arg_specs)
    down = plan.arg_names.index("params/layers/0/down")
    specs[down] = ((), ("x",))  # Neither the first dim nor the largest.
    with pytest.raises(cfp.PlanMismatch, match="0/down would be sharded other"):
        adapted(replace(plan, arg_specs=tuple(specs)), *arguments(5))


def drawn_choice(analysis, rng, blocks=None):
    """A choice in which blocks, parameters and segments differ from each other."""
    frame, count = analysis.frame, len(analysis.segments)
    kernels = [
        SegmentKernels(
            attention=rng.choice(["chunked", "xla"]) if i % 2 else "",
            spread=rng.choice(["", "ring"]) if blocks is None else "",
        )
        for i in range(count)
    ]
    return Choice(
        blocks
        or tuple(
            rng.choice(block_strategies(frame.program, block, frame.mesh))
            for block in frame.blocks
        ),
        tuple(rng.choice([*Storage]) for _ in frame.groups),
        tuple(sorted(rng.sample(range(count), count // 2))),
        tuple((i, one) for i, one in enumerate(kernels) if one),
    )


@pytest.fixture(scope="module", params=[(("x", 4),), (("x", 2), ("y", 2))], ids=str)
def modelled(request):
    """A tiny GPT's step, its arguments, and its analysis on a mesh."""
    step, args = build("gpt", **TINY["gpt"])
    mesh = make_mesh(request.param)
    return step, args, mesh, analyze_step(flatten_step(step, args), mesh).analysis


@pytest.mark.parametrize("seed", [0, *at_night([1, 2])])
def test_every_part_of_a_choice_is_carried_over(modelled, seed):
    """A saved plan for the very same step comes out as it was."""
    step, args, mesh, analysis = modelled
    rng = random.Random(seed)
    level = rng.choice([*ConstraintLevel])
    options = {"xla_cpu_enable_fast_min_max": "true"}
    # Kernels compute attentions where strategies are not drawn, too.
    by_name = presets(analysis.frame)["data_parallel"].blocks
    choice = drawn_choice(analysis, rng, by_name if seed == 0 else None)
    winner = Candidate("drawn", choice, level=level, options=options)
    plan = compose_plan(analysis, mesh, {}, RaceOutcome(winner=winner))
    loaded = cfp.Plan.from_json(
        json.loads(plan.to_json()), mesh=mesh, allowed_options=[*options]
    )
    assert loaded.segments == plan.segments and loaded.rows == plan.rows
    again = cfp.adapt(loaded, step, *args)
    modes = [one.storage for s in again.segments for one in s.parameters]
    assert len({*modes}) > 1
    assert again.segments == plan.segments
    assert [row.strategy for row in again.rows] == [row.strategy for row in plan.rows]
    assert again.constraints == plan.constraints
    if seed == 0:
        assert again.constraints.replaced and again.constraints.rematerialized
    assert (again.level, again.options) == (level, options)


@pytest.mark.parametrize(
    "model",
    [
        "gpt",
        # Its parameters are some of those kinds.
        pytest.param("llama", marks=pytest.mark.nightly),
    ],
)
def test_storage_goes_to_the_same_parameters_of_more_than_ten_layers(model):
    """Arguments are in the order of their names: layer_10 before layer_2."""

    def form(name):
        return re.sub(r"\d+", "#", name)

    mesh = make_mesh((("x", 4),))
    step, args = build(model, **{**TINY[model], "layers": 3})
    frame = (analysis := analyze_step(flatten_step(step, args), mesh).analysis).frame
    names = [form(frame.program.arg_names[group.args[0]]) for group in frame.groups]
    stored = dict(zip(sorted({*names}), itertools.cycle(Storage), strict=False))
    choice = replace(
        presets(frame)["data_parallel"], storage=tuple(stored[name] for name in names)
    )
    outcome = RaceOutcome(winner=Candidate("by name", choice))
    plan = compose_plan(analysis, mesh, {}, outcome)
    step, args = build(model, **{**TINY[model], "layers": 11})
    again = cfp.adapt(plan, step, *args)
    parameters = [one for segment in again.segments for one in segment.parameters]
    assert len(parameters) > 2 * len(frame.groups)
    for one in parameters:
        name = again.arg_names[one.argument]
        assert one.storage == stored[form(name)], name


def test_a_head_of_its_own_is_stored_as_most_parameters_and_not_as_a_shared_one():
    """Storage of what a segment only reads is that of another segment."""

    def step_of(head):
        def loss_fn(w, tokens):
            x = jnp.take(w["table"], tokens, axis=0)
            for up, down in zip(w["up"], w["down"], strict=True):
                x = x + jnp.tanh(x @ up) @ down
            with jax.named_scope("scores"):
                return jax.nn.logsumexp(x @ w[head].T, axis=-1).sum()

        def step(w, tokens):
            loss, grad = jax.value_and_grad(loss_fn)(w, tokens)
            return jax.tree.map(lambda a, b: a - b, w, grad), loss

        return step

    kernels = {"up": [jnp.ones((16, 32))] * 3, "down": [jnp.ones((32, 16))] * 3}
    w, tokens = kernels | {"table": jnp.ones((64, 16))}, jnp.zeros((8, 4), int)
    mesh = make_mesh((("x", 4),))
    step = flatten_step(step_of("table"), (w, tokens))
    frame = (analysis := analyze_step(step, mesh).analysis).frame
    names = [frame.program.arg_names[group.args[0]] for group in frame.groups]
    storage = [
        Storage.LARGEST if name == "w/table" else Storage.SHARDED for name in names
    ]
    choice = replace(presets(frame)["data_parallel"], storage=tuple(storage))
    outcome = RaceOutcome(winner=Candidate("tied", choice))
    plan = compose_plan(analysis, mesh, {}, outcome)
    assert any(one.shown_storage is not one.storage for one in plan.segments)
    w["head"] = jnp.ones((64, 16))
    again = cfp.adapt(plan, step_of("head"), w, tokens)
    stored = {
        again.arg_names[one.argument]: one.storage
        for segment in again.segments
        for one in segment.parameters
    }
    assert stored["w/head"] is Storage.SHARDED
    assert stored["w/table"] is Storage.LARGEST


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("rows", 0, "segment"), 99),
        (("rows", 0, "block"), 1),
        (("rows", 0, "strategy", 0, "axis"), "y"),
        (("rows", 0, "strategy", 0, "role"), "diagonal"),
        (("segments", 0, "parameters", 0, "argument"), 99),
        (("segments", 0, "parameters", 0, "storage"), "elsewhere"),
        (("segments", 0, "kernels", "attention"), "abacus"),
        (("segments", 0, "kernels", "spread"), "star"),
        (("segments", 0, "rematerialized"), "yes"),
        (("level",), "nothing"),
    ],
    ids=str,
)
def test_a_file_with_another_choice_than_there_is_is_refused(saved, path, value):
    data = json.loads(saved["data_parallel"].to_json())
    *inner, last = path
    part = data
    for key in inner:
        part = part[key]
    assert part[last] != value
    part[last] = value
    with pytest.raises(cfp.PlanFileError, match=f"damaged plan, in {path[0]}"):
        cfp.Plan.from_json(data)


def test_the_command_line(saved, how, tmp_path):
    (tmp_path / "toy.py").write_text(STEP)
    saved["zero1"].save(tmp_path / "plan.json")
    words = "plan toy.py:deep --donate 0 --adapt plan.json -o deep.json"
    text, data = run_batch([words.split(), [*words.split(), "--json"]], tmp_path)
    assert text.code == data.code == 0, (text.err, data.err)
    assert "Carried over" in " ".join(text.out.split())
    kept = json.loads((tmp_path / "deep.json").read_text())
    printed = json.loads(data.out)
    assert "throughput" in printed
    assert {key: printed[key] for key in kept} == kept
    wanted = adapted(saved["zero1"], *arguments(5))
    assert cfp.Plan.load(tmp_path / "deep.json").arg_specs == wanted.arg_specs


@pytest.mark.parametrize("name", PRESETS)
def test_a_plan_goes_on_along_fewer_axes_and_on_one_device(saved, name):
    """An axis of size one is none: what was sharded along it is whole."""
    one = adapted(saved[name], *arguments(3), mesh=make_mesh((("x", 1),)))
    assert one.mesh_axes == ()
    stored = {p.storage for segment in one.segments for p in segment.parameters}
    assert stored <= {Storage.USED}
    assert not any(axes for spec in one.arg_specs for axes in spec)
    assert not any(axes for spec in one.output_specs for axes in spec)


def test_on_one_device_no_loop_is_said_to_be_whole(looped):
    """Nothing else is possible there."""
    one = make_mesh((("x", 1),))
    found = cfp.adapt(looped, SCANNED_STEP, *scanned(4), mesh=one, donate_argnums=0)
    assert found.replicated_ops == ()


def test_a_plan_goes_on_along_one_of_two_axes(how):
    two = cfp.plan(
        STEP_FN,
        *arguments(3),
        preset="x=data,y=tensor",
        **how | {"mesh": make_mesh((("x", 2), ("y", 2)))},
    )
    one = adapted(two, *arguments(3), mesh=make_mesh((("x", 2), ("y", 1))))
    (alone,) = (
        cfp.plan(STEP_FN, *arguments(3), preset="data_parallel", **how | {"mesh": mesh})
        for mesh in [make_mesh((("x", 2),))]
    )
    assert one.mesh_axes == (("x", 2),)
    assert one.arg_specs == alone.arg_specs
