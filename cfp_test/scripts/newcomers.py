"""Six first programs, as someone new to cfp writes them from the README and docs/.

Each is planned, trained for five steps beside plain JAX, and saved; another process
loads the plan, and trains the same five steps. On virtual CPU devices, with small
models; `--preset data_parallel` takes a preset in place of the search.

    python -m cfp_test.scripts.newcomers             # all six
    python -m cfp_test.scripts.newcomers nnx lora    # some of them
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICES = 4
STEPS = 5
TOLERANCE = 2e-4  # Relative L2 of the worst leaf after five steps of Adam.

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    f"--xla_force_host_platform_device_count={DEVICES} "
    "--xla_backend_optimization_level=0",
)

import equinox as eqx  # noqa: E402
import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

import cfp  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Program:
    """A first program.

    Attributes:
        step: takes the parts of the state, and a batch; returns the parts of the state,
            if it has any, and a loss or metrics.
        init: makes the parts of the state.
        batch: makes the batch of a step.
        trains: whether the state comes back.
        plainly: what runs it without cfp.
    """

    step: Callable[..., Any]
    init: Callable[[], tuple[Any, ...]]
    batch: Callable[[int], tuple[Any, ...]]
    trains: bool = True
    plainly: Callable[..., Any] = jax.jit


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def tokens(seed: int, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, 64)


# ------------------------------------------------------- 1. an NNX GPT with dropout


class Attention(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.q = nnx.Linear(width, width, rngs=rngs)
        # With a bias, whose gradient is zero, its update by Adam would be rounding.
        self.k = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (f(x).reshape(*x.shape[:2], 4, -1) for f in (self.q, self.k, self.v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.reshape(x.shape))


class Layer(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = Attention(width, rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Gpt(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.layers = nnx.List([Layer(32, rngs) for _ in range(2)])
        self.head = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        x = self.embed(text)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def nnx_gpt() -> Program:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def train_step(model: Any, optimizer: Any, text: jax.Array) -> Any:
        def loss_fn(model: Any) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model(text[:, :-1]), text[:, 1:]
            )
            return losses.mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return model, optimizer, loss

    def init() -> tuple[Any, ...]:
        model = Gpt(nnx.Rngs(0, dropout=1))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    return Program(step=train_step, init=init, batch=lambda i: (tokens(i, 8, 17),))


# --------------------------------------------------- 2. a linen mixer with TrainState


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            y = nn.Dense(16)(nn.gelu(nn.Dense(32)(y)))
            x = x + y.swapaxes(1, 2)
            x = x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(1))


def linen_mixer() -> Program:
    model = Mixer()

    def train_step(state: TrainState, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["image"])
            labels = batch["label"]
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, labels
            ).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    tx = optax.adam(1e-3)

    def init() -> tuple[Any, ...]:
        params = model.init(jax.random.key(0), normal(0, 1, 16, 32))["params"]
        return (TrainState.create(apply_fn=model.apply, params=params, tx=tx),)

    def batch(i: int) -> tuple[Any, ...]:
        return ({"image": normal(i, 8, 16, 32), "label": tokens(i, 8) % 10},)

    return Program(step=train_step, init=init, batch=batch)


# ----------------------------------------------------------- 3. an Equinox model


class Classifier(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    drop: eqx.nn.Dropout

    def __init__(self, key: jax.Array) -> None:
        one, two = jax.random.split(key)
        self.first = eqx.nn.Linear(16, 32, key=one)
        self.norm = eqx.nn.LayerNorm(32)
        self.mlp = eqx.nn.MLP(32, 8, 64, 1, activation=jax.nn.silu, key=two)
        self.drop = eqx.nn.Dropout(0.1)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        return self.mlp(self.drop(self.norm(self.first(x)), key=key))


def equinox_model() -> Program:
    tx = optax.adam(1e-3)

    def train_step(model: Any, opt: Any, x: jax.Array, y: jax.Array, key: Any) -> Any:
        def loss_fn(model: Any) -> jax.Array:
            found = jax.vmap(model)(x, jax.random.split(key, len(x)))
            return ((found - y) ** 2).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt = tx.update(grads, opt, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt, loss

    def init() -> tuple[Any, ...]:
        model = Classifier(jax.random.key(0))
        return model, tx.init(eqx.filter(model, eqx.is_inexact_array))

    def batch(i: int) -> tuple[Any, ...]:
        return normal(i, 8, 16), normal(i + 100, 8, 8), jax.random.key(i)

    return Program(step=train_step, init=init, batch=batch, plainly=eqx.filter_jit)


# ----------------------------------- 4. MultiSteps, scanned layers, rematerialization


def scanned_multisteps() -> Program:
    tx = optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2)

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    def train_step(params: Any, opt: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            h, _ = jax.lax.scan(jax.checkpoint(layer), x @ p["embed"], p["layers"])
            return ((h @ p["head"] - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    def init() -> tuple[Any, ...]:
        params = {
            "embed": normal(0, 16, 32) / 4,
            "layers": {
                "up": normal(1, 4, 32, 64) / 6,
                "down": normal(2, 4, 64, 32) / 8,
            },
            "head": normal(3, 32, 16) / 6,
        }
        return params, tx.init(params)

    def batch(i: int) -> tuple[Any, ...]:
        return normal(i, 8, 16), normal(i + 100, 8, 16)

    return Program(step=train_step, init=init, batch=batch)


# ----------------------------------------------------------- 5. an evaluation step


def evaluation() -> Program:
    model = Mixer()

    def eval_step(params: Any, batch: Any) -> Any:
        logits = model.apply({"params": params}, batch["image"])
        labels = batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return {"loss": losses.sum(), "right": (logits.argmax(-1) == labels).sum()}

    def init() -> tuple[Any, ...]:
        return (model.init(jax.random.key(0), normal(0, 1, 16, 32))["params"],)

    batch = linen_mixer().batch
    return Program(step=eval_step, init=init, batch=batch, trains=False)


# ------------------------------------------------------------------------ 6. LoRA


def lora() -> Program:
    shapes = {"up": (16, 64), "down": (64, 16)}
    labels = {name: {"base": "frozen", "a": "lora", "b": "lora"} for name in shapes}
    tx = optax.multi_transform(
        {"lora": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels
    )

    def apply(p: Any, x: jax.Array) -> jax.Array:
        return x @ p["base"] + (x @ p["a"]) @ p["b"]

    def train_step(params: Any, opt: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            return ((apply(p["down"], jax.nn.relu(apply(p["up"], x))) - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    def init() -> tuple[Any, ...]:
        params = {
            name: {
                "base": normal(i, rows, columns) / 4,
                "a": normal(i + 10, rows, 4) / 4,
                "b": jnp.zeros((4, columns)),
            }
            for i, (name, (rows, columns)) in enumerate(shapes.items())
        }
        return params, tx.init(params)

    def batch(i: int) -> tuple[Any, ...]:
        return normal(i, 8, 16), normal(i + 100, 8, 16)

    return Program(step=train_step, init=init, batch=batch)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "nnx": nnx_gpt,
    "linen": linen_mixer,
    "equinox": equinox_model,
    "multisteps": scanned_multisteps,
    "evaluation": evaluation,
    "lora": lora,
}

# --------------------------------------------------------------------- what is checked


def run(program: Program, step: Callable[..., Any], init: Any) -> Any:
    """Returns the results of five steps: the state and the losses."""
    state, results = init, []
    for number in range(STEPS):
        result = step(*state, *program.batch(number))
        if program.trains:
            *state, result = result
        results.append(result)
    return tuple(state) if program.trains else (), results


def mesh_of_all() -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), ("x",), devices=jax.devices()[:DEVICES])


def worst(found: Any, expected: Any) -> tuple[float, str]:
    """The distance and the path of the leaf that is furthest off."""
    furthest = cfp.compare(found, expected)[0]
    return furthest.relative_l2, furthest.path


def first_process(name: str, folder: Path, preset: str | None) -> bool:
    """Plans, trains, compares with plain JAX, and saves."""
    program = PROGRAMS[name]()
    started = time.perf_counter()
    plan = cfp.plan(
        program.step,
        *program.init(),
        *program.batch(0),
        mesh=mesh_of_all(),
        preset=preset,
        cache_dir=folder,
    )
    seconds = time.perf_counter() - started
    expected = run(program, program.plainly(program.step), program.init())
    found = run(program, plan.apply(program.step), program.init())
    far, path = worst(found, expected)
    plan.save(folder / f"{name}.json")
    losses = [next(iter(jax.tree.leaves(one))) for one in found[1]]
    print(f"{name}: planned in {seconds:.1f} s: {plan.winner}")
    print(f"  blocks: {', '.join(dict.fromkeys(row.name for row in plan.rows))}")
    print(f"  losses: {', '.join(f'{float(loss):.4f}' for loss in losses)}")
    print(f"  five steps against plain JAX: {path} is furthest, {far:.1e}")
    sharded = sum(any(spec) for spec in plan.arg_specs)
    print(f"  {sharded} of {len(plan.arg_specs)} argument leaves are sharded")
    return far <= TOLERANCE


def second_process(name: str, folder: Path) -> bool:
    """Loads the plan that another process saved, and trains again."""
    program = PROGRAMS[name]()
    plan = cfp.Plan.load(folder / f"{name}.json", mesh=mesh_of_all())
    expected = run(program, program.plainly(program.step), program.init())
    if program.trains:
        state = plan.init(program.init)
    else:
        state = (plan.init(lambda: program.init()[0]),)
    found = run(program, plan.apply(program.step), state)
    far, path = worst(found, expected)
    print(f"  loaded elsewhere, state by plan.init: {path} is furthest, {far:.1e}")
    return far <= TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*PROGRAMS, []], default=[])
    parser.add_argument("--preset", help="a preset in place of a search")
    parser.add_argument("--second", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.names or list(PROGRAMS)
    if options.second is not None:
        return int(not all(second_process(name, options.second) for name in names))
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            good &= first_process(name, Path(folder), options.preset)
            sys.stdout.flush()
            again = [sys.executable, "-m", "cfp_test.scripts.newcomers", name]
            again += ["--second", folder]
            good &= subprocess.run(again, check=False).returncode == 0
    print("all as plain JAX does" if good else "FAILED")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
