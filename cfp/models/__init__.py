"""Example models by name, with their train steps.

Building a model needs `pip install 'cfp[models]'`. `build` returns a train step and
abstract arguments, enough for planning. `initialise` returns functions for a real run:

    train_step, args = build("gpt", layers=2)
    init_fn, make_batch = initialise("gpt", layers=2)
    state = init_fn(jax.random.key(0))
    state, metrics = jax.jit(train_step)(state, make_batch(jax.random.key(1)))
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import PartitionSpec

from cfp.errors import CfpError, OptionError, known_names
from cfp.models.layers import TOKENS, Batch, TrainState, TrainStep, make_train_step
from cfp.models.model import Config, Model, Scalar
from cfp.models.transformers import BERT, GPT, LLAMA, MOE

__all__ = ["MODELS", "Model", "build", "find", "initialise", "logical_names"]

MODELS = MappingProxyType({"gpt": GPT, "moe": MOE, "bert": BERT, "llama": LLAMA})


def find(name: str) -> Model:
    """Returns the model of a name; raises OptionError if the name is unknown."""
    if name not in MODELS:
        raise OptionError(f"Unknown model {name!r}. {known_names(name, MODELS)}")
    return MODELS[name]


def build(name: str, **options: Scalar) -> tuple[TrainStep, tuple[TrainState, Batch]]:
    """Makes a train step and its abstract arguments; allocates no array.

    Args:
      **options: see `find(name).options`.

    Returns:
      `(train_step, (state, batch))`, the arguments as trees of jax.ShapeDtypeStruct.

    Raises:
      OptionError: the name or an option is unknown, or a value is not allowed.
      CfpError: optax is not installed.
    """
    model, config, optimizer = _settled(name, options)
    step = make_train_step(partial(model.apply, config), optimizer, config.microbatches)
    init_fn, make_batch = initialise(name, **options)
    key = jax.eval_shape(jax.random.key, 0)
    return step, (jax.eval_shape(init_fn, key), jax.eval_shape(make_batch, key))


def initialise(
    name: str, **options: Scalar
) -> tuple[Callable[[jax.Array], TrainState], Callable[[jax.Array], Batch]]:
    """Makes functions that return a model's initial state and a random batch.

    Args and errors are those of `build`.

    Returns:
      `(init_fn, make_batch)`, jitted functions of a `jax.random.key`. For a sharded
      result, wrap them: `jax.jit(init_fn, out_shardings=...)`.
    """
    model, c, optimizer = _settled(name, options)

    def init_fn(key: jax.Array) -> TrainState:
        params = model.init(c, key)
        return TrainState(params, optimizer.init(params))

    def make_batch(key: jax.Array) -> Batch:
        return model.random_batch(key, c.batch, c.seq, c.vocab)

    return jax.jit(init_fn), jax.jit(make_batch)


def logical_names(name: str, **options: Scalar) -> tuple[TrainState, Batch]:
    """Logical dim names of a train step's arguments, for sharding it by hand.

    Args and errors are those of `build`.

    Returns:
      `(state, batch)` like those of `build`, with a PartitionSpec of logical names
      (`cfp.models.layers`) in place of each array.
    """
    model, config, _ = _settled(name, options)
    state, batch = build(name, **options)[1]
    params = model.param_names(config)
    adam = state.opt_state[0]._replace(count=PartitionSpec(), mu=params, nu=params)
    tokens = {key: PartitionSpec(*TOKENS[: leaf.ndim]) for key, leaf in batch.items()}
    return TrainState(params, (adam, *state.opt_state[1:])), tokens


def _settled(name: str, options: Mapping[str, Scalar]) -> tuple[Model, Config, Any]:
    config = find(name).config(**options)
    try:
        import optax
    except ModuleNotFoundError as error:
        raise CfpError(
            "optax is not installed, and models by name need it: "
            "pip install 'cfp[models]'."
        ) from error
    return find(name), config, optax.adamw(config.learning_rate)
