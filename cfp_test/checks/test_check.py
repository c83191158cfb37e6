"""The check passes plans that are right and fails those that are not, in any precision.

A fault is put into the step that the plan's side runs; what it computes then is what
devices compute that lack a sum, or take another one's part.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from cfp import api
from cfp.checking import check as check_module
from cfp.checking import trial
from cfp.checking.check import (
    DOUBLE_TOLERANCE,
    FULL_TOLERANCE,
    Check,
    Leaf,
    Reference,
    both_sides,
    compile_alone,
    needed_bytes,
)
from cfp.checking.trial import Trial, run_trial
from cfp.cli.running import check_lines
from cfp.context import PlannerSettings
from cfp.errors import CfpError, StepNotTraceable
from cfp.plan import execute
from cfp.profiling.record import MEMORY_SHARE
from cfp.program.memory import memory_kind
from cfp.program.step import flatten_step
from cfp.targets import Target, model_target
from cfp_test.models.tiny import TINY
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

DTYPES = ["bfloat16", "float32"]
PRESETS = ["data_parallel", "fully_sharded", "tensor_parallel"]
OPTIMIZERS = {
    "adamw": optax.adamw(3e-4),
    "sgd": optax.sgd(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "lion": optax.lion(1e-4),
    "adafactor": optax.adafactor(1e-3),
}
pytestmark = pytest.mark.usefixtures("compiled_once", "compared_on_one")

FAULTS = ["half batch", "scaled", "lost sum", "wrong part", "stale part", "dropout"]
BATCH, SEQ, WIDTH, VOCAB = 8, 16, 32, 64


def make_step(dtype, optimizer, fault=None):
    """A layer of attention with dropout: what right and wrong plans compute of it."""

    def attention(p, x):
        # Softmax does not see the key's bias: its gradient is zero but for rounding.
        keys = x @ p["key"] + p["key_bias"]
        mixed = jax.nn.softmax(x @ p["query"] @ keys.mT / WIDTH**0.5) @ x
        if fault == "lost sum":
            return mixed[..., : WIDTH // 2] @ p["out"][: WIDTH // 2]
        return mixed @ p["out"]

    def loss_fn(params, batch):
        p = jax.tree.map(lambda v: v.astype(dtype), params)
        x = p["embed"][batch["tokens"]]
        kept = jax.random.bernoulli(jax.random.key(3), 0.8, x.shape)
        if fault == "dropout":
            first = jnp.arange(BATCH)[:, None, None] < BATCH // 2
            kept = jnp.where(first, kept, jnp.roll(kept, 1, axis=0))
        x = jnp.where(kept, x + attention(p, x), 0) * p["scale"] + p["bias"]
        logits = (x @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["labels"]
        ).mean()

    def step(state, batch):
        if fault == "half batch":
            batch = jax.tree.map(lambda v: jnp.tile(v[: BATCH // 2], (2, 1)), batch)
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        if fault == "scaled":
            grads = jax.tree.map(lambda g: 2 * g, grads)
        if fault == "wrong part":
            grads = jax.tree.map(lambda g: jnp.roll(g, len(g) // 2, axis=0), grads)
        updates, opt_state = OPTIMIZERS[optimizer].update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        if fault == "stale part":
            new = jax.tree.map(
                lambda n, old: old.at[: len(old) // 2].set(n[: len(n) // 2]),
                new,
                params,
            )
        return (new, opt_state), {"loss": loss}

    return step


@functools.cache
def initialiser(optimizer):
    """The program that makes a state and a batch, compiled once for all tests."""

    def init(key):
        keys = iter(jax.random.split(key, 7))
        square = (WIDTH, WIDTH)
        params = {
            "embed": jax.random.normal(next(keys), (VOCAB, WIDTH)),
            "query": jax.random.normal(next(keys), square) / WIDTH**0.5,
            "key": jax.random.normal(next(keys), square) / WIDTH**0.5,
            "key_bias": jnp.zeros(WIDTH),
            "out": jax.random.normal(next(keys), square) / WIDTH**0.5,
            "scale": jnp.ones(WIDTH),
            "bias": jnp.zeros(WIDTH),
            "head": jax.random.normal(next(keys), (WIDTH, VOCAB)) / WIDTH**0.5,
        }
        batch = {
            name: jax.random.randint(next(keys), (BATCH, SEQ), 0, VOCAB)
            for name in ("tokens", "labels")
        }
        return (params, OPTIMIZERS[optimizer].init(params)), batch

    return jax.jit(init)


def make_args(optimizer):
    """A state and a batch."""
    return initialiser(optimizer)(jax.random.key(0))


# ------------------------------------------------------------------- right plans pass


def trial_of(target: Target, preset: str, devices: int, folder) -> Trial:
    """Two steps under a preset, checked."""
    plan = api.plan(
        target.step,
        *target.args,
        mesh=make_mesh((("x", devices),)),
        donate_argnums=target.donate,
        preset=preset,
        cache_dir=folder,
        settings=PlannerSettings(race=False),
    )
    return run_trial(plan, target, steps=2, check=True)


@pytest.mark.parametrize("dtype", ["float32", *at_night(["bfloat16"])])
def test_noise_alone_passes(dtype, tmp_path):
    args = make_args("adamw")
    target = Target(
        name="attention",
        step=make_step(dtype, "adamw"),
        args=args,
        donate=(0,),
        make_args=lambda shardings, _: tuple(map(jax.device_put, args, shardings)),
    )
    trial = trial_of(target, "data_parallel", 4, tmp_path)
    assert trial.tolerance == FULL_TOLERANCE
    assert trial.failures == []
    far = {d.path for d in trial.steps[0].comparison if d.relative_l2 > 1e-4}
    # What one device is not sure of itself: this leaf, and its moments.
    assert far and all(path.endswith("/key_bias") for path in far)


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(
    "preset", ["data_parallel", "fully_sharded", "tensor_parallel"]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", TINY)
def test_right_plans_pass(model, dtype, preset, devices, tmp_path):
    options = {**TINY[model], "dtype": dtype, "learning_rate": 3e-4}
    trial = trial_of(model_target(model, options), preset, devices, tmp_path)
    assert trial.tolerance == FULL_TOLERANCE
    assert trial.failures == []


# ---------------------------------------------------------------- wrong plans do not


@functools.cache
def compiled(dtype, optimizer, fault=None):
    """The step for one device, as a check compiles it."""
    step = flatten_step(make_step(dtype, optimizer, fault), make_args(optimizer))
    return compile_alone(step, jax.devices()[0])


def shares(dtype, optimizer, fault):
    """Measures how far off each leaf is after a step, in terms of what it may be."""
    check = Check(
        compiled(dtype, optimizer, fault),
        Reference(compiled(dtype, optimizer)),
        {0: 0},
    )
    check.start(make_args(optimizer))
    found = check.step()
    failed = {d.path for d in found.failures}
    allowed = {leaf.path: leaf.relative_l2 / leaf.allowed for leaf in found}
    noise = {leaf.path for leaf in found if leaf.is_undecided}
    assert all(path.endswith("/key_bias") for path in noise)
    assert failed == {path for path, share in allowed.items() if share > 1} - noise
    return allowed


# Where faults show: in parameters, and in the first kind of optimizer state.
STATE = {"adamw": "1/0/mu", "momentum": "1/0/trace", "lion": "1/0/mu"}


COMPUTED = [
    ("float32", "adamw"),
    ("float32", "sgd"),
    *at_night(("bfloat16", name) for name in OPTIMIZERS),
]


@pytest.mark.parametrize(
    ("dtype", "optimizer", "fault"),
    [
        *(("float32", "adamw", fault) for fault in FAULTS),
        ("float32", "sgd", "scaled"),
        *at_night(("float32", "sgd", fault) for fault in FAULTS if fault != "scaled"),
        *at_night(("bfloat16", *one) for one in itertools.product(OPTIMIZERS, FAULTS)),
    ],
)
def test_wrong_plans_fail(dtype, optimizer, fault):
    found = shares(dtype, optimizer, fault)
    assert max(found.values()) > 1000
    signal = [name for name in found if not name.endswith("/key_bias")]
    of_params = [found[name] for name in signal if name.startswith("0/0/")]
    if fault == "scaled" and optimizer in ("adamw", "lion", "adafactor"):
        assert max(of_params) < 100  # They divide it out, from the parameters.
    else:
        assert min(of_params) > 5
    if fault != "stale part" and optimizer in STATE:
        state = [found[name] for name in signal if "0/" + STATE[optimizer] in name]
        assert len(state) == 7
        assert min(state) > 100


@pytest.mark.parametrize(("dtype", "optimizer"), COMPUTED)
def test_what_is_right_is_not_off(dtype, optimizer):
    assert max(shares(dtype, optimizer, None).values()) == 0


class Made(NamedTuple):
    """Results with names."""

    state: dict[str, jax.Array]
    total: jax.Array


@pytest.mark.parametrize(
    ("result", "name"), [(Made, "state"), (lambda *both: both, "0")]
)
def test_small_changes_of_state_are_compared_in_any_tuple(result, name):
    def compiled(rate, kept=1.0):
        def step(state, x):
            new = {"up": state["up"] - rate * x, "kept": state["kept"] * kept}
            return result(new, x.sum())

        return compile_alone(flatten_step(step, args), jax.devices()[0])

    args = {"up": jnp.ones(8), "kept": jnp.ones(4)}, jnp.ones(8)
    right, wrong = compiled(1e-5), compiled(0.5e-5)
    check = Check(wrong, Reference(right, unrounded=compiled(2e-5, 1.5)), {0: 0})
    check.start(args)
    found = check.step()
    assert [one.path for one in found.failures] == [f"{name}/up"]
    assert found.failures[0].change == pytest.approx(1e-5, rel=0.02)
    # What does not change is compared with its norm.
    off = {f"{name}/up": 1.0, f"{name}/kept": 1 / 3}
    assert found.rounded == pytest.approx(off, rel=0.02)


# ------------------------------------------------------------- what is never allowed


def leaf(distance, noise, *sizes, tolerance=1e-5):
    """A leaf with its norm, and those that rounding makes of it."""
    return Leaf(
        path="w",
        relative_l2=distance,
        rounding=noise,
        change=1.0,
        size=sizes[0] if sizes else 0.0,
        norms=sizes[1:],
        tolerance=tolerance,
    )


def fails(one):
    return one.is_far and not one.is_undecided


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.1, 0.5, 3.0, float("inf")])
@pytest.mark.parametrize("tolerance", [1e-5, 1.0, 1e9])
def test_a_leaf_of_zeros_never_passes(noise, tolerance):
    zeros = leaf(1.0, noise, 0.0, 0.9, 1.1, tolerance=tolerance)
    assert zeros.allowed < 1 and fails(zeros)


def test_ten_times_the_rounding_passes_and_no_more():
    assert not fails(leaf(0.0099, 1e-3)) and fails(leaf(0.0101, 1e-3))


def test_where_rounding_decides_the_size_is_compared():
    noise = leaf(1.4, 1.4, 1.1, 0.9, 1.0)
    assert noise.is_undecided and not fails(noise)
    for size in (0.0, 0.005, 200.0):
        assert fails(leaf(1.4, 1.4, size, 0.9, 1.0))
    # What is not compared with anything is not known to be alike.
    assert fails(leaf(1.4, 1.4))


def test_a_step_in_float64_is_compared_in_float64():
    """A value computed in float32 somewhere is off by 1e-8, and found."""

    def make(fault):
        def step(w, x):
            y = jnp.tanh(x @ w)
            return w - 0.1 * (y.astype(jnp.float32).astype(y.dtype) if fault else y)

        return step

    with jax.enable_x64(True):
        w, x = (jax.random.normal(jax.random.key(i), (8, 8)) for i in range(2))
        assert w.dtype == jnp.float64
        device = jax.devices()[0]
        right, wrong = (
            compile_alone(flatten_step(make(fault), (w, x)), device)
            for fault in (False, True)
        )
        assert right.double and not wrong.double
        check = Check(right, Reference(right), {0: None})
        check.start((w, x))
        assert check.tolerance == DOUBLE_TOLERANCE
        assert check.step().failures == []
        other = Check(
            wrong, Reference(right), {0: None}, given_tolerance=DOUBLE_TOLERANCE
        )
        other.start((w, x))
        found = other.step()
        assert 1e-10 < found[0].relative_l2 < 1e-6
        assert found.failures != []


def test_the_plans_own_compiler_options_are_used(monkeypatch, tmp_path):
    """Those with which it runs, the memory limit among them."""
    args = make_args("sgd")
    plan = api.plan(
        make_step("float32", "sgd"),
        *args,
        mesh=make_mesh((("x", 4),)),
        preset="data_parallel",
        cache_dir=tmp_path,
        settings=PlannerSettings(race=False),
    )
    options = {MEMORY_SHARE: "40", "xla_backend_optimization_level": "0"}
    asked = []

    def compile_with(lowered, options):
        asked.append(dict(options))
        return lowered.compile(), ""

    monkeypatch.setattr(execute, "compile_right", compile_with)
    both_sides(replace(plan, options=options))
    assert sorted(asked, key=len) == [{}, options]


def with_host(step):
    """A step, a function of the host in it."""

    def stepped(state, batch):
        state, metrics = step(state, batch)
        loss = metrics["loss"]
        return state, {"loss": jax.pure_callback(lambda x: x, loss, loss)}

    return stepped


def with_precise_products(step):
    """A step that asks for precise products itself."""

    def stepped(state, batch):
        with jax.default_matmul_precision("highest"):
            return step(state, batch)

    return stepped


def with_rounding(step):
    """A step that rounds a float32 to fewer bits, which a check leaves out."""

    def stepped(state, batch):
        state, metrics = step(state, batch)
        return state, {"loss": jax.lax.reduce_precision(metrics["loss"], 8, 7)}

    return stepped


def with_integers(step):
    """A step with a result of integers."""

    def stepped(state, batch):
        state, metrics = step(state, batch)
        return state, metrics | {"tokens": batch["tokens"].sum()}

    return stepped


@pytest.mark.parametrize(
    ("dtype", "programs", "changed", "donated"),
    [
        ("float32", 1, None, ()),
        ("float32", 1, with_integers, 0),
        ("float32", 1, with_precise_products, ()),
        ("bfloat16", 2, None, ()),
        ("float32", 2, with_rounding, ()),
        ("float32", 2, with_host, ()),
    ],
)
def test_what_computes_in_float32_already_is_checked_as_it_is(
    dtype, programs, changed, donated, monkeypatch, tmp_path
):
    """And not compiled once more; one device's program is another."""
    step = make_step(dtype, "sgd")
    plan = api.plan(
        changed(step) if changed else step,
        *make_args("sgd"),
        donate_argnums=donated,
        mesh=make_mesh((("x", 4),)),
        preset="data_parallel",
        cache_dir=tmp_path,
        settings=PlannerSettings(race=False),
    )
    asked, compile_right = [], execute.compile_right
    monkeypatch.setattr(
        execute, "compile_right", lambda *how: asked.append(how) or compile_right(*how)
    )
    compiled = plan.compile_bound()
    asked.clear()
    planned, alone = both_sides(plan, compiled)
    assert len(asked) == programs
    assert (planned.compiled is compiled.compiled) == (programs == 1)
    check = Check(planned, alone, {0: 0})
    check.start(make_args("sgd"))
    assert check.step().failures == []


def small_target():
    return Target(
        name="small",
        step=make_step("float32", "sgd"),
        args=make_args("sgd"),
        donate=(0,),
        make_args=lambda shardings, _: tuple(
            map(jax.device_put, make_args("sgd"), shardings)
        ),
    )


def has_no_room(monkeypatch, most_devices):
    """Makes so many devices together have a byte less than a check needs of each."""

    def needed(planned, step):
        scarce = len(step.in_shardings[0].device_set) <= most_devices
        return 2**40 + scarce

    monkeypatch.setattr(check_module, "needed_bytes", needed)
    monkeypatch.setattr(check_module, "room_of", lambda _: 2**40)


@pytest.mark.explained("There is no room for the check")
def test_a_check_that_has_no_room_says_what_it_needs(monkeypatch, tmp_path):
    """Memory that the plan's own step lacks is another error."""

    def no_room(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    cases = {
        (Check, "step"): "RESOURCE_EXHAUSTED(.|\n)*--check needs more memory",
        (trial, "feed_back"): "failed on the devices(.|\n)*memory budget",
    }
    for (where, name), message in cases.items():
        with monkeypatch.context() as patched:
            patched.setattr(where, name, no_room)
            with pytest.raises(CfpError, match=message):
                trial_of(small_target(), "data_parallel", 2, tmp_path)
    has_no_room(monkeypatch, 2)
    needs = "about .* for one device; or about .* for the preset fully_sharded"
    with pytest.raises(CfpError, match=f"no room for the check(.|\n)*{needs}"):
        trial_of(small_target(), "data_parallel", 2, tmp_path)


@pytest.mark.parametrize(
    ("preset", "other"),
    [
        ("fully_sharded", "tensor_sequence_parallel"),
        *at_night([("data_parallel", "fully_sharded")]),
    ],
)
def test_without_room_on_one_device_a_preset_is_the_reference(
    preset, other, monkeypatch, tmp_path
):
    """One that shards its arguments in another way than the plan."""
    has_no_room(monkeypatch, 1)
    found = trial_of(small_target(), preset, 2, tmp_path)
    assert found.preset == other
    assert found.failures == []
    assert f"step as written, sharded over the same devices by {other}" in " ".join(
        " ".join(check_lines(found)).split()
    )
    assert all(step.comparison for step in found.steps)


@dataclass(frozen=True)
class Settings:
    """A static argument with a name that arrays have, too."""

    sharding: str = "none"


def test_static_arguments_stay_what_they_are(tmp_path):
    """The second is compared by identity: what is rebuilt would be another."""

    def step(state, settings, call, x):
        assert settings.sharding == "none"
        return call(state, x.sum())

    def scaled(state, x):
        return {name: leaf * (1 - 1e-3 * x) for name, leaf in state.items()}

    call = jax.tree_util.Partial(scaled)
    state = {name: jnp.arange(1.0, 9.0) for name in ("a", "b")}
    target = Target(
        name="static",
        step=step,
        args=(state, Settings(), call, jnp.ones(8)),
        static=(1, 2),
        make_args=lambda shardings, _: (
            jax.device_put(state, shardings[0]),
            Settings(),
            call,
            jax.device_put(jnp.ones(8), shardings[1]),
        ),
    )
    plan = api.plan(
        step,
        *target.args,
        static_argnums=(1, 2),
        mesh=make_mesh((("x", 2),)),
        preset="replicated",
        cache_dir=tmp_path,
        settings=PlannerSettings(race=False),
    )
    found = run_trial(plan, target, steps=2, check=True)
    assert found.failures == []


def test_a_wrong_plan_fails_beside_a_preset(monkeypatch, tmp_path):
    has_no_room(monkeypatch, 1)
    args = make_args("sgd")
    plan = api.plan(
        make_step("float32", "sgd"),
        *args,
        mesh=make_mesh((("x", 2),)),
        preset="data_parallel",
        cache_dir=tmp_path,
        settings=PlannerSettings(race=False),
    )
    right, sharded = both_sides(plan)
    assert sharded.preset == "fully_sharded"
    for planned, passes in (
        (right, True),
        (compiled("float32", "sgd", "scaled"), False),
    ):
        check = Check(planned, sharded, {0: 0})
        check.start(make_args("sgd"))
        assert (check.step().failures == []) == passes


def test_a_check_needs_what_the_larger_program_does():
    """With its arguments, and with results that take no donated argument's place."""

    def sized(arguments, temporary, results, aliased, is_here=True):
        size = SimpleNamespace(
            argument_size_in_bytes=arguments,
            temp_size_in_bytes=temporary,
            output_size_in_bytes=results,
            alias_size_in_bytes=aliased,
            generated_code_size_in_bytes=0,
            host_argument_size_in_bytes=1,
            host_output_size_in_bytes=0,
        )
        sharding = SimpleNamespace(is_fully_addressable=is_here)
        return SimpleNamespace(
            compiled=SimpleNamespace(memory_analysis=lambda: size),
            in_shardings=[sharding],
            out_shardings=[sharding],
        )

    right = sized(10, 56, 12, 10)
    assert needed_bytes(sized(1, 1, 1, 1), right) == 68
    assert needed_bytes(sized(20, 57, 12, 11), right) == 78
    # Of what several processes share nothing is in the host's memory meanwhile.
    shared = sized(10, 56, 12, 10, is_here=False)
    assert needed_bytes(sized(1, 1, 1, 1), shared) == 68 + 10 + 12


def live_bytes(known):
    """Bytes of arrays on the first device that are not known, each buffer once."""
    held = {}
    for one in jax.live_arrays():
        if id(one) in known or one.is_deleted() or memory_kind(one):
            continue
        for shard in one.addressable_shards:
            if shard.device == jax.devices()[0]:
                data = shard.data
                held[data.unsafe_buffer_pointer()] = data.nbytes
    return sum(held.values())


@pytest.mark.parametrize("donate", [(), (0,)])
def test_a_check_holds_no_more_than_it_says(donate, monkeypatch, tmp_path):
    """A state is all that takes room here: while it is compared, and changed.

    But for two copies of one leaf.
    """

    def step(state, x):
        return {name: leaf - 1e-3 * x.sum() for name, leaf in state.items()}

    def make(seed):
        keys = jax.random.split(jax.random.key(seed), 4)
        shape = (512, 512)
        state = {f"w{i}": jax.random.normal(key, shape) for i, key in enumerate(keys)}
        return state, jnp.ones(8)

    def make_args(shardings, seed):
        return tuple(map(jax.device_put, make(seed), shardings))

    target = Target(
        name="state", step=step, args=make(0), donate=donate, make_args=make_args
    )
    known = {id(one) for one in jax.live_arrays()}
    peaks, rooms = [], []

    def measured(*pair, measure=check_module._measured):
        peaks.append(live_bytes(known))
        return measure(*pair)

    def changed(*args, change=check_module.nudge, **how):
        made = change(*args, **how)
        peaks.append(live_bytes(known))
        return made

    def found(*sides):
        rooms.append(needed_bytes(*sides))
        return rooms[-1]

    monkeypatch.setattr(check_module, "_measured", measured)
    monkeypatch.setattr(check_module, "nudge", changed)
    monkeypatch.setattr(check_module, "FULL_TOLERANCE", 0.0)
    monkeypatch.setattr(check_module, "needed_bytes", found)
    trial_of(target, "replicated", 2, tmp_path)
    state_bytes = 4 * 512 * 512 * 4
    assert max(peaks) > state_bytes
    assert max(peaks) <= rooms[0] + state_bytes // 2 + 64 * 2**10


class Alone:
    """One device, on which rounding does as much as is given, call by call."""

    def __init__(self, noise):
        self.step = flatten_step(lambda x: x, (jnp.ones(()),))
        self.in_shardings = self.out_shardings = [
            jax.sharding.SingleDeviceSharding(jax.devices()[0])
        ]
        self.noise = noise
        self.calls = 0

    def __call__(self, x):
        off = self.noise[self.calls]
        self.calls += 1
        return {"bias": jnp.array([1.0 + off, 0.0])}


class Planned:
    """A plan's step, whose result is off by so much."""

    double = False
    in_shardings = (jax.sharding.SingleDeviceSharding(jax.devices()[0]),)

    def __init__(self, off):
        self.off = off
        self.narrow, self.perturbed = (), None

    def __call__(self, x):
        return {"bias": jnp.array([1.0 + self.off, 0.0])}


@pytest.mark.parametrize(("off", "most"), [(1.1e-4, 4), (1.5e-3, 16)])
def test_rounding_is_looked_at_more_closely_before_a_check_fails(off, most):
    """As of a bias that one gradient near zero decides: 3 of 16 tries say nothing."""
    alone = Alone([0.0] + [6.7e-6] * 3 + [3e-5] * 13)
    check = Check(Planned(off), Reference(alone), {})
    check.start([jnp.ones(())])
    told: list[str] = []
    found = check.step(told.append)
    assert alone.calls == 1 + most
    runs = [line for line in told if line.startswith("measuring rounding")]
    assert [line.rpartition(",")[2] for line in runs] == [
        f" run {n} of at most 16" for n in range(1, most + 1)
    ]
    # It ends with the first that explains the difference.
    assert (found.failures == []) == (most < 16)


@pytest.mark.parametrize(("off", "calls"), [(2e-5, 2), (0.5e-5, 1)])
def test_what_passes_is_not_looked_at_more_closely(off, calls):
    """A leaf within the tolerance passes whatever rounding does."""
    alone = Alone([0.0] + [6.7e-6] * 3)
    check = Check(Planned(off), Reference(alone), {})
    check.start([jnp.ones(())])
    assert check.step().failures == []
    assert alone.calls == calls


class Leader:
    """Says for all processes that a check passes, after so many times."""

    def __init__(self, fails):
        self.fails = fails
        self.asked = []

    def __call__(self, flag):
        self.asked.append(flag)
        return len(self.asked) > self.fails


@pytest.mark.parametrize(("fails", "calls"), [(0, 1), (1, 2), (3, 4), (99, 17)])
def test_all_processes_run_until_a_check_passes_in_the_leader(fails, calls):
    """One that stopped alone would leave the others waiting for its devices."""
    alone, agreed = Alone([0.0] * 17), Leader(fails)
    check = Check(Planned(0.0), Reference(alone), {}, agreed)
    check.start([jnp.ones(())])
    assert check.step().failures == []
    assert alone.calls == calls
    assert all(agreed.asked)


def of_named_devices():
    """A target whose code has a mesh of four devices."""
    mesh = make_mesh((("x", 4),))
    rows = jax.NamedSharding(mesh, jax.P("x"))

    def step(w, x):
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), rows)
        squares = jax.shard_map(
            lambda part: jax.lax.psum((part**2).sum(), "x"),
            mesh=mesh,
            in_specs=jax.P("x"),
            out_specs=jax.P(),
        )
        return w - 0.1 * (x.T @ hidden), squares(hidden)

    args = jnp.full((16, 16), 0.1), jnp.linspace(0.0, 1.0, 512).reshape(32, 16)

    def make_args(shardings, _):
        return tuple(map(jax.device_put, args, shardings))

    return Target(name="named", step=step, args=args, donate=(), make_args=make_args)


def test_a_step_whose_code_names_devices_is_checked_on_these(tmp_path):
    found = trial_of(of_named_devices(), "fully_sharded", 4, tmp_path)
    assert found.preset == check_module.AS_WRITTEN
    assert found.failures == []
    text = "\n".join(check_lines(found))
    assert "equal those of the step as written on the same devices" in text
    assert "The step's code names several devices" in text


def test_a_step_whose_code_names_other_devices_says_so(tmp_path):
    with pytest.raises(StepNotTraceable, match="Plan and run on one mesh"):
        trial_of(of_named_devices(), "fully_sharded", 2, tmp_path)
