"""Mistakes of users, each with its whole message."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

import cfp

W = {
    name: jax.ShapeDtypeStruct(s, "float32")
    for name, s in (("up", (512, 2048)), ("down", (2048, 512)))
}
X = jax.ShapeDtypeStruct((32, 512), "float32")
SMALL = jnp.ones((8, 8))


def train_step(w, x):
    def loss_fn(w):
        return ((jnp.tanh(x @ w["up"]) @ w["down"] - x) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(w)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, grads), loss


def evaluated(state, x):
    return train_step(state["params"], x)[1]


def scaled(x, mode="gram", times=2):
    return (x @ x.T if mode == "gram" else x) * times


def branching(w, x):
    return w["up"] if w["down"].sum() > 0 else w["up"] + x.sum()


def repeated(x, times):
    return [x] * times


def own_error(*args):
    raise ValueError("of my own")


def shaped_by_a_value(w, x):
    return jnp.zeros(x[0, 0])


def printed_in_order(x):
    jax.debug.print("{}", x.sum(), ordered=True)
    return x


def called_in_order(x):
    io_callback(print, None, x.sum(), ordered=True)
    return x


def keyword_step(x, preset=None, fn=None):
    return x * 2 if preset or fn else x


def variants_of_one_error(run):
    variants = [
        cfp.Variant(name=name, fn=own_error, args=(W, X), mesh=cfp.described("4xh100"))
        for name in ("one", "two", "three")
    ]
    return cfp.plan_fastest(variants, cache_dir=run.keywords["cache_dir"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    settings = cfp.PlannerSettings(per_kind=2, race=False)
    return functools.partial(cfp.plan, mesh=mesh, cache_dir=folder, settings=settings)


@pytest.fixture(scope="module")
def plan(run):
    return run(train_step, W, X, preset="data_parallel")


def bad_pins(**pins):
    return lambda run, plan, folder: run(
        train_step, W, X, pins={k.replace("__", "/"): v for k, v in pins.items()}
    )


def bad_preset(name):
    return lambda run, plan, folder: run(train_step, W, X, preset=name)


def bad_step(fn, *args, **options):
    return lambda run, plan, folder: run(fn, *(args or (W, X)), **options)


def loaded(text):
    def load(run, plan, folder):
        (folder / "bad.json").write_text(text)
        return cfp.Plan.load(folder / "bad.json")

    return load


MANY = {f"layer_{i}": {"w": SMALL} for i in range(30)}
PINS = {
    "a pin of one of many": bad_step(lambda w: w, MANY, pins={"layer": jax.P("x")}),
    "a pin of nothing": bad_pins(nothing=jax.P("x")),
    "a pin of a misspelled path": bad_pins(w__upp=jax.P("x")),
    "a pin to an axis that is not there": bad_pins(up=jax.P("z")),
    "a pin to an axis twice": bad_pins(up=jax.P("x", "x")),
    "a pin of too many dims": bad_pins(up=jax.P(None, None, "x")),
}
OTHER_STEPS = {
    "other arguments": lambda run, plan, folder: plan.compile(
        train_step, W, jax.ShapeDtypeStruct((32, 513), "float32")
    ),
    "another batch": lambda run, plan, folder: plan.compile(
        train_step, W, jax.ShapeDtypeStruct((16, 512), "float32")
    ),
    "another batch and name": lambda run, plan, folder: plan.compile(
        lambda w, batch: train_step(w, batch),
        W,
        jax.ShapeDtypeStruct((16, 512), "float32"),
    ),
    "swapped arguments": lambda run, plan, folder: plan.compile(train_step, X, W),
    "another model": lambda run, plan, folder: plan.bind(
        lambda w, x: (w, x),
        {"up": W["up"], "layers": [{"w": SMALL} for _ in range(300)]},
        jax.ShapeDtypeStruct((64, 512), "float32"),
    ),
    "an evaluation step": lambda run, plan, folder: plan.apply(evaluated)(
        {"params": W}, X
    ),
    "another program": lambda run, plan, folder: plan.compile(
        lambda w, x: jax.tree.map(lambda leaf: leaf * 2, train_step(w, x)), W, X
    ),
}
PRESETS = (
    "fsdp FSDP zero3 zero-3 ddp tp tensor_paralel qqqq "
    "expert_parallel ep EP Expert-Parallel hsdp HSDP"
).split()
CASES = {
    **{f"preset {name}": bad_preset(name) for name in PRESETS},
    "a setting that is not there": lambda *_: cfp.PlannerSettings(perkind=3),
    "an option of plan in settings": lambda *_: cfp.PlannerSettings(memory_budget=1),
    "a step that is wrapped already": lambda *_: cfp.parallelize(
        cfp.parallelize(train_step)
    ),
    "settings as a dict": bad_step(train_step, settings={"per_kind": 2}),
    "a budget in words": bad_step(train_step, memory_budget="plenty"),
    "a budget without a unit": bad_step(train_step, memory_budget=2),
    "a misspelled option of plan": bad_step(train_step, memory_buget="20GiB"),
    "a misspelled option of bind": lambda run, plan, folder: plan.bind(
        train_step, W, X, donate_argnum=0
    ),
    "a misspelled option of parallelize": lambda *_: cfp.parallelize(
        train_step, donate_argnum=0
    ),
    "an option's name as a keyword": lambda run, plan, folder: cfp.parallelize(
        keyword_step, mesh=run.keywords["mesh"], static_argnames="preset"
    )(SMALL, preset="data_parallel"),
    "donating what is not there": bad_step(scaled, SMALL, donate_argnums=(3,)),
    "donating an unknown name": bad_step(scaled, SMALL, donate_argnames="state"),
    "an unknown static name": bad_step(scaled, SMALL, static_argnames="state"),
    "a static list": lambda run, plan, folder: cfp.parallelize(
        scaled, mesh=run.keywords["mesh"], static_argnums=1
    )(SMALL, ["gram"]),
    "a missing argument": bad_step(branching, W),
    "swapped arguments": bad_step(branching, X, W),
    "a number where a static one is needed": bad_step(repeated, SMALL, 2),
    "a mesh in words": bad_step(train_step, mesh="4"),
    "a mesh as a described cluster": bad_step(train_step, mesh="8xh100"),
    "a mesh as a shape": bad_step(train_step, mesh=(4,)),
    "the mesh before the step": lambda run, *_: cfp.parallelize(
        run.keywords["mesh"], train_step
    ),
    "a mesh as the step": lambda run, *_: cfp.plan(run.keywords["mesh"], train_step),
    "a mesh as an argument of the step": lambda run, *_: cfp.plan(
        train_step, run.keywords["mesh"], W, X
    ),
    "a described mesh as an argument of the step": bad_step(
        train_step, W, X, cfp.described("4xh100")
    ),
    "text that is not static": bad_step(lambda x, flag: x, SMALL, "text"),
    "a step that branches on a value": bad_step(branching),
    "a step that makes a shape of a value": bad_step(shaped_by_a_value),
    "a step with an error of its own": bad_step(own_error),
    "variants with an error of their own": lambda run, *_: variants_of_one_error(run),
    "prints in order": bad_step(printed_in_order, SMALL),
    "calls in order": bad_step(called_in_order, SMALL),
    "a plan that is not there": lambda run, plan, folder: cfp.parallelize(
        train_step, plan=folder / "nope.json"
    ),
    "a file without a plan": loaded("{}"),
    "a file of a cache in place of a folder": lambda run, plan, folder: run(
        train_step, W, X, cache_dir=folder / "bad.json" / "below"
    ),
    "a plan for another mesh": lambda run, plan, folder: plan.on(
        jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    ),
}


def messages(cases, *given):
    """The message of each case, and the type of its error."""
    texts = {}
    for name, case in cases.items():
        with pytest.raises(cfp.CfpError) as caught:
            case(*given)
        texts[name] = f"{type(caught.value).__name__}: {caught.value}"
    return texts


def test_swapped_arguments_are_named_if_the_other_order_traces(run):
    how = {"static_argnums": 0}
    for step, args, options, said in (
        (train_step, (X, W), {}, True),
        (lambda n, w, x: train_step(w, x), (2, X, W), how, True),
        (lambda w, x: w["none"], (W, X), {}, False),
        (lambda w: w["none"], (W,), {}, False),
        (own_error, (W, X), {}, False),
    ):
        with pytest.raises(cfp.StepNotTraceable) as caught:
            run(step, *args, **options)
        hint = "JAX traces it with 'w' and 'x' swapped. Swap them in your call."
        assert (hint in str(caught.value)) == said


def test_a_position_is_no_name(run):
    with pytest.raises(cfp.OptionError, match=r"static_argnames names \['0'\]"):
        run(scaled, SMALL, static_argnames=(0, "x"))


def test_arguments_of_equal_types_are_not_tried_swapped(run):
    traced = []

    def step(w, x, *others):
        traced.append(w)
        return w["none"]

    with pytest.raises(cfp.StepNotTraceable):
        run(step, X, X, X, X)
    assert len(traced) == 1


def test_an_unknown_preset_is_refused_before_tracing(run):
    def step(x):
        raise AssertionError("traced")

    with pytest.raises(cfp.OptionError, match="Did you mean 'fully_sharded'"):
        run(step, SMALL, preset="fsdp")


@pytest.mark.explained("A pin matches no argument, or does not fit")
def test_pins_that_do_not_fit_are_refused_by_name(run, plan, tmp_path, golden):
    golden("pins", messages(PINS, run, plan, tmp_path))


@pytest.mark.explained("The step's program is not the one that was planned")
def test_steps_that_do_not_fit_a_plan_are_refused(run, plan, tmp_path, golden):
    golden("other_steps", messages(OTHER_STEPS, run, plan, tmp_path))


@pytest.mark.explained("Leave out ordered=True")
def test_mistakes_are_refused_with_advice(run, plan, tmp_path, golden):
    golden("refusals", messages(CASES, run, plan, tmp_path))


def test_the_text_of_a_whole_module_is_cut(run):
    def step(w):
        raise TypeError("\n".join(["Module(", *["  w" * 200] * 90]))

    with pytest.raises(cfp.StepNotTraceable) as refused:
        run(step, SMALL)
    first, where, *text = str(refused.value).split("\n")
    assert first == "JAX could not trace 'step':" and "in step: raise" in where
    assert len(text) == 3 and text[0] == "TypeError: Module(", "no line of jax.jit"
    assert max(map(len, text)) <= 300


def test_arguments_are_named_by_path(run):
    with pytest.raises(cfp.StepNotTraceable, match="w/down") as refused:
        run(branching, W, X)
    assert "leaves[" not in str(refused.value)
