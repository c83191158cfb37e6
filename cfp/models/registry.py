"""Models by name: what they are called, their options, and their train steps.

`build` gives a step and abstract arguments, which is all that planning needs;
`initialise` gives what it takes to run that step for real:

    train_step, args = build("gpt", layers=2)
    init_fn, make_batch = initialise("gpt", layers=2)
    state = init_fn(jax.random.key(0))
    state, metrics = jax.jit(train_step)(state, make_batch(jax.random.key(1)))
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from cfp.models.bert import BERTConfig, bert
from cfp.models.gpt import GPTConfig, gpt
from cfp.models.layers import TOKENS
from cfp.models.llama import LlamaConfig, llama
from cfp.models.moe import MoEConfig, moe
from cfp.models.options import ModelOption, Scalar, options_of
from cfp.models.train import (
    Batch,
    Network,
    TrainConfig,
    TrainState,
    TrainStep,
    init_state,
    make_train_step,
)

InitFn = Callable[[jax.Array], TrainState]
BatchFn = Callable[[jax.Array], Batch]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that can be built by name.

    Attributes:
      config: the frozen dataclass of its options.
      network: makes the network from such a configuration.
    """

    doc: str
    config: type
    network: Callable[[Any], Network]

    @property
    def options(self) -> tuple[ModelOption, ...]:
        """All options, the model's own and those of training."""
        return options_of(self.config) + options_of(TrainConfig)


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "gpt": Model(doc="a GPT decoder", config=GPTConfig, network=gpt),
        "moe": Model(doc="a GShard mixture of experts", config=MoEConfig, network=moe),
        "bert": Model(doc="a BERT encoder", config=BERTConfig, network=bert),
        "llama": Model(doc="a LLaMA 2 decoder", config=LlamaConfig, network=llama),
    }
)


def find(name: str) -> Model:
    """Looks a model up.

    Raises:
      ValueError: there is none of that name; the message lists those there are.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known models: {', '.join(MODELS)}")
    return MODELS[name]


def build(name: str, **options: Scalar) -> tuple[TrainStep, tuple[TrainState, Batch]]:
    """Makes a train step and its abstract arguments; allocates no array.

    Args:
      **options: see `find(name).options`.

    Returns:
      `(train_step, (state, batch))`, the arguments as trees of jax.ShapeDtypeStruct.

    Raises:
      ValueError: the name or an option is unknown, or the options do not fit together.
    """
    recipe = _Recipe.of(name, options)
    train = recipe.train
    train_step = make_train_step(recipe.network, train.optimizer(), train.microbatches)
    return train_step, recipe.abstract_args()


def initialise(name: str, **options: Scalar) -> tuple[InitFn, BatchFn]:
    """Makes the functions that give a model's first state and a random batch.

    Args and errors are those of `build`.

    Returns:
      `(init_fn, make_batch)`. Each takes a `jax.random.key` and is jitted; to have the
      result sharded, wrap it: `jax.jit(init_fn, out_shardings=...)`.
    """
    recipe = _Recipe.of(name, options)
    recipe.abstract_args()  # Raises here, not at the first call, if options misfit.
    return jax.jit(recipe.init), jax.jit(recipe.batch)


def logical_names(name: str, **options: Scalar) -> tuple[TrainState, Batch]:
    """The names of the dims of a train step's arguments, for sharding it by hand.

    Args and errors are those of `build`.

    Returns:
      `(state, batch)` like those of `build`, with a PartitionSpec of logical names
      (`cfp.models.layers`) in place of each array. The optimizer's moments have the
      names of their parameters.
    """
    recipe = _Recipe.of(name, options)
    state, batch = recipe.abstract_args()
    params = recipe.network.param_names(batch)
    moments = optax.tree.map_params(
        recipe.train.optimizer(),
        lambda _, names: names,
        state.opt_state,
        params,
        transform_non_params=lambda _: PartitionSpec(),
    )
    tokens = {key: PartitionSpec(*TOKENS[: leaf.ndim]) for key, leaf in batch.items()}
    return TrainState(params, moments), tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """A model with its options settled."""

    train: TrainConfig
    network: Network

    @classmethod
    def of(cls, name: str, options: Mapping[str, Scalar]) -> "_Recipe":
        model = find(name)
        known = [option.name for option in model.options]
        for option in options:
            if option not in known:
                raise ValueError(
                    f"model {name!r} has no option {option!r}; known options: "
                    f"{', '.join(known)}"
                )
        for_train = {option.name for option in options_of(TrainConfig)}
        train = {k: v for k, v in options.items() if k in for_train}
        shape = {k: v for k, v in options.items() if k not in for_train}
        return cls(
            train=TrainConfig(**train),  # pyright: ignore[reportArgumentType]
            network=model.network(model.config(**shape)),
        )

    def init(self, key: jax.Array) -> TrainState:
        train = self.train
        # Of the size that runs at once, which a model may refuse.
        batch = self.network.random_batch(key, train.batch // train.microbatches)
        return init_state(self.network, train.optimizer(), key, batch)

    def batch(self, key: jax.Array) -> Batch:
        return self.network.random_batch(key, self.train.batch)

    def abstract_args(self) -> tuple[TrainState, Batch]:
        def args() -> tuple[TrainState, Batch]:
            key = jax.random.key(0)
            return self.init(key), self.batch(key)

        return jax.eval_shape(args)
