"""Models by name: their options, and their train steps.

`build` gives a step and abstract arguments, which is all that planning needs;
`initialise` gives what it takes to run that step for real:

    train_step, args = build("gpt", layers=2)
    init_fn, make_batch = initialise("gpt", layers=2)
    state = init_fn(jax.random.key(0))
    state, metrics = jax.jit(train_step)(state, make_batch(jax.random.key(1)))
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from cfp.models.layers import TOKENS
from cfp.models.moe import MOE
from cfp.models.network import Network
from cfp.models.options import Config, ModelOption, Scalar, options_of
from cfp.models.train import Batch, TrainState, TrainStep, make_train_step
from cfp.models.transformers import BERT, GPT, LLAMA

InitFn = Callable[[jax.Array], TrainState]
BatchFn = Callable[[jax.Array], Batch]

# Options that not every model has.
_OWN = ("tied", "experts", "expert_group_size", "kv_heads")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that can be built by name.

    Attributes:
      own: names of the options that not every model has.
      defaults: those that differ from `Config`'s.
    """

    doc: str
    network: Network
    own: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def options(self) -> tuple[ModelOption, ...]:
        """All options, the model's own and those of training."""
        return tuple(
            dataclasses.replace(
                option, default=self.defaults.get(option.name, option.default)
            )
            for option in options_of()
            if option.name in self.own or option.name not in _OWN
        )

    def config(self, **options: Scalar) -> Config:
        """The configuration with these options.

        Raises:
          ValueError: an option is unknown, or the options do not fit together.
        """
        known = [option.name for option in self.options]
        for option in options:
            if option not in known:
                raise ValueError(
                    f"{self.doc} has no option {option!r}; known options: "
                    f"{', '.join(known)}"
                )
        config = Config(**{**self.defaults, **options})
        if refusal := self.network.refusal(config):
            raise ValueError(refusal)
        return config


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "gpt": Model(doc="a GPT decoder", network=GPT, own=("tied",)),
        "moe": Model(
            doc="a GShard mixture of experts",
            network=MOE,
            own=("experts", "expert_group_size"),
            defaults={"vocab": 32000, "hidden": 1280, "heads": 4},
        ),
        "bert": Model(
            doc="a BERT encoder",  # By default, BERT-large.
            network=BERT,
            defaults={"vocab": 30522, "seq": 512, "layers": 24},
        ),
        "llama": Model(
            doc="a LLaMA 2 decoder",  # By default, of 7 billion parameters.
            network=LLAMA,
            own=("kv_heads",),
            defaults={"vocab": 32000, "hidden": 4096, "layers": 32, "heads": 32},
        ),
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
    model = find(name)
    config, optimizer = _settled(model, options)
    apply = partial(model.network.apply, config)
    step = make_train_step(apply, optimizer, config.microbatches)
    return step, _abstract(*initialise(name, **options))


def initialise(name: str, **options: Scalar) -> tuple[InitFn, BatchFn]:
    """Makes the functions that give a model's first state and a random batch.

    Args and errors are those of `build`.

    Returns:
      `(init_fn, make_batch)`. Each takes a `jax.random.key` and is jitted; to have the
      result sharded, wrap it: `jax.jit(init_fn, out_shardings=...)`.
    """
    network = find(name).network
    c, optimizer = _settled(find(name), options)

    def init_fn(key: jax.Array) -> TrainState:
        params = network.init(c, key)
        return TrainState(params, optimizer.init(params))

    def make_batch(key: jax.Array) -> Batch:
        return network.random_batch(key, c.batch, c.seq, c.vocab)

    return jax.jit(init_fn), jax.jit(make_batch)


def logical_names(name: str, **options: Scalar) -> tuple[TrainState, Batch]:
    """The names of the dims of a train step's arguments, for sharding it by hand.

    Args and errors are those of `build`.

    Returns:
      `(state, batch)` like those of `build`, with a PartitionSpec of logical names
      (`cfp.models.layers`) in place of each array. The optimizer's moments have the
      names of their parameters.
    """
    model = find(name)
    config, optimizer = _settled(model, options)
    state, batch = _abstract(*initialise(name, **options))
    moments = optax.tree.map_params(
        optimizer,
        lambda _, names: names,
        state.opt_state,
        params := model.network.param_names(config),
        transform_non_params=lambda _: PartitionSpec(),
    )
    tokens = {key: PartitionSpec(*TOKENS[: leaf.ndim]) for key, leaf in batch.items()}
    return TrainState(params, moments), tokens


def _settled(
    model: Model, options: Mapping[str, Scalar]
) -> tuple[Config, optax.GradientTransformation]:
    config = model.config(**options)
    return config, optax.adamw(config.learning_rate)


def _abstract(init_fn: InitFn, make_batch: BatchFn) -> tuple[TrainState, Batch]:
    def args() -> tuple[TrainState, Batch]:
        key = jax.random.key(0)
        return init_fn(key), make_batch(key)

    return jax.eval_shape(args)
