"""Every model at a size that a test can train, and what tests ask of them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from cfp.models import build, find, initialise
from cfp.models.layers import TrainState

GPT_TINY = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "batch": 4,
    "seq": 16,
    "vocab": 96,
    "dtype": "float32",
    "learning_rate": 1e-2,
}
MOE_TINY = {**GPT_TINY, "layers": 4, "experts": 4, "expert_group_size": 32}
LLAMA_TINY = {**GPT_TINY, "kv_heads": 2, "ffn": 48}
TINY = {"gpt": GPT_TINY, "moe": MOE_TINY, "bert": GPT_TINY, "llama": LLAMA_TINY}

# Tiny programs take far longer to compile than to run.
quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def count(tree):
    """The numbers in a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def attention_params(hidden):
    return 4 * hidden * hidden + 3 * hidden  # keys have no bias


def mlp_params(hidden, ffn):
    return 2 * hidden * ffn + ffn + hidden


def apply_of(name, **options):
    """A tiny model's function of parameters and a batch, with these options changed."""
    model = find(name)
    config = model.config(**{**TINY[name], **options})
    return functools.partial(model.apply, config)


@functools.cache
def built(name, dtype):
    """A tiny model's step and its abstract arguments."""
    return build(name, **{**TINY[name], "dtype": dtype})


@functools.cache
def traced(name, dtype):
    """A tiny model's step, traced once for all tests that look at it or run it."""
    train_step, args = built(name, dtype)
    return jax.jit(train_step).trace(*args)


@functools.cache
def make_batch(name):
    """A tiny model's batch."""
    return initialise(name, **TINY[name])[1](jax.random.key(1))


def network(name, **options):
    """A tiny model's function, parameters that are all random, and a batch.

    The parameters come from NumPy: to compile a model's own takes seconds.
    """
    rng = np.random.default_rng(0)
    _, (state, _) = build(name, **{**TINY[name], **options})
    params = jax.tree.map(
        lambda p: rng.normal(scale=0.3, size=p.shape).astype(np.float32), state.params
    )
    return apply_of(name, **options), params, make_batch(name)


@functools.cache
def start(name):
    """A tiny model's own first state."""
    init_fn, _ = initialise(name, **TINY[name])
    return quick_jit(init_fn)(jax.random.key(0))


def draw_start(name, **options):
    """A step of any size, with arguments that take no program to make but the batch's.

    Parameters are all random, as those of `network`; the optimizer has seen nothing.
    """
    step, (state, _) = build(name, **options)
    _, batch_fn = initialise(name, **options)
    rng = np.random.default_rng(0)
    moments = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state.opt_state)
    params = jax.tree.map(
        lambda p: rng.normal(scale=0.1, size=p.shape).astype(p.dtype), state.params
    )
    first = jax.tree.map(jnp.asarray, TrainState(params, moments))
    return step, (first, batch_fn(jax.random.key(1)))


@functools.cache
def train(name, dtype="float32"):
    """Six steps on one batch: the metrics of each, and the last state."""
    options = {"xla_backend_optimization_level": 0}
    step = traced(name, dtype).lower().compile(compiler_options=options)
    state, history = start(name), []
    for _ in range(6):
        state, metrics = step(state, make_batch(name))
        history.append({key: float(value) for key, value in metrics.items()})
    return history, state


def stack(trees):
    """Trees of one structure as one tree, their arrays stacked on dim 0."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def scanned(name, params):
    """An unrolled model's parameters, or what has their structure, as scan has them."""
    layers = [params[f"layer_{i}"] for i in range(TINY[name]["layers"])]
    rest = {k: v for k, v in params.items() if not k.startswith("layer_")}
    if name == "moe":
        pairs = {"dense": stack(layers[0::2]), "expert": stack(layers[1::2])}
        return {**rest, "pairs": pairs}
    return {**rest, "layers": stack(layers)}
