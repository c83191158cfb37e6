"""`Model`: options, parameters with named dims, and layers run in a row or by `scan`.

Options are declared once, for Python, the command line, and checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from pydantic import (
    BaseModel,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from cfp.errors import OptionError, known_names
from cfp.models.layers import Batch, Params, inside, random_text
from cfp.printable import first_error

Scalar = int | float | str | bool | None


class ModelOption(NamedTuple):
    """An option of a model or target; a model derives a default None from others."""

    name: str
    type: type
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        """The command line's flag, such as `--expert-group-size`."""
        return "--" + self.name.replace("_", "-")


def _option(default: Scalar, doc: str, least: int | None = None) -> Any:
    return Field(default, description=doc, ge=least)


class Config(BaseModel, frozen=True, strict=True, extra="forbid"):
    """Options of all models and of training, checked.

    The defaults are GPT's; `Model.config` applies `Model.defaults` over them.
    """

    vocab: int = _option(51200, "tokens in the vocabulary", least=2)
    seq: PositiveInt = _option(1024, "tokens in a sequence")
    hidden: PositiveInt = _option(1024, "width of the residual stream")
    layers: PositiveInt = _option(4, "layers; in `moe` every second has experts")
    heads: PositiveInt = _option(16, "attention heads; they divide hidden")
    ffn: PositiveInt | None = _option(None, "width inside the MLP and each expert")
    dtype: Literal["float32", "bfloat16"] = _option("bfloat16", "type of activations")
    scan: bool = _option(False, "run the layers in a loop, with stacked parameters")
    remat: bool = _option(False, "rematerialize each layer in the backward pass")

    tied: bool = _option(False, "use the token embedding as the head's kernel")
    experts: int | None = _option(None, "experts in an expert layer", least=2)
    expert_group_size: PositiveInt | None = _option(
        None, "tokens routed together; divide a microbatch's"
    )
    kv_heads: PositiveInt | None = _option(
        None, "heads of keys and values; they divide heads"
    )

    batch: PositiveInt = _option(16, "sequences in a batch")
    microbatches: PositiveInt = _option(1, "sequential parts of a batch; divide batch")
    learning_rate: PositiveFloat = _option(3e-4, "AdamW's learning rate")

    @model_validator(mode="after")
    def _divides(self) -> Config:
        part = "batch / microbatches" if self.microbatches > 1 else "batch"
        tokens = {part: self.batch // self.microbatches, "seq": self.seq}
        for sizes, part in (
            ({"hidden": self.hidden}, "heads"),
            ({"heads": self.heads}, "kv_heads"),
            ({"batch": self.batch}, "microbatches"),
            (tokens, "expert_group_size"),
        ):
            if prod(sizes.values()) % (parts := getattr(self, part) or 1):
                got = ", ".join(f"{name}={size}" for name, size in sizes.items())
                raise ValueError(
                    f"{' * '.join(sizes)} must be divisible by {part}, got {got} and "
                    f"{part}={parts}"
                )
        return self

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.hidden // self.heads


INIT_STDDEV = 0.02
# (layer's parameters, input) -> output, and a penalty or None.
Layer = Callable[[Params, jax.Array], tuple[jax.Array, jax.Array | None]]
# Options of single models: a model has them if its `defaults` name them.
_OWN = ("tied", "experts", "expert_group_size", "kv_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that can be built by name.

    Attributes:
      ends: parameters outside of layers, as a tree; a leaf has the logical names of the
        parameter's dims, such as "embed vocab".
      layers: parameters of each layer of a round, by name. Rounds repeat in the model.
      apply: function (config, params, batch) -> logits [batch, seq, vocab], and a
        penalty [] that is added to the loss.
      defaults: defaults that differ from `Config`'s, and the own options' defaults.
      random_batch: function of a key, batch, seq and vocab.
      ffn: function from `hidden` to the default width inside the MLPs.
      even_heads: True if rotary embedding turns pairs, which needs an even head_dim.
    """

    doc: str
    ends: Mapping[str, Any]
    layers: Mapping[str, Mapping[str, Any]]
    apply: Callable[[Config, Params, Batch], tuple[jax.Array, jax.Array]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    random_batch: Callable[[jax.Array, int, int, int], Batch] = random_text
    ffn: Callable[[int], int] = lambda hidden: 4 * hidden
    even_heads: bool = False

    @property
    def options(self) -> tuple[ModelOption, ...]:
        """All options of the model and its training, with the model's defaults."""
        found = []
        for name, one in Config.model_fields.items():
            if name in self.defaults or name not in _OWN:
                default = self.defaults.get(name, one.default)
                kind = int if default is None else type(default)
                found.append(ModelOption(name, kind, default, one.description or ""))
        return tuple(found)

    def config(self, **options: Scalar) -> Config:
        """Makes a checked configuration.

        Raises:
          OptionError: an option is unknown, or an option's value is not allowed.
        """
        known = [option.name for option in self.options]
        for option in options.keys() - known:
            raise OptionError(
                f"{self.doc} has no option {option!r}. {known_names(option, known)}"
            )
        try:
            config = Config(**{**self.defaults, **options})
        except ValidationError as error:
            name, wanted, got = first_error(error)
            text = f"{name} must be {wanted}, got {got}" if name else wanted
            raise OptionError(f"{text}.") from error
        if self.even_heads and config.head_dim % 2:
            raise OptionError(
                "hidden / heads must be even, as rotary embedding turns pairs, got "
                f"hidden={config.hidden} and heads={config.heads}."
            )
        if config.scan and config.layers % len(self.layers):
            raise OptionError(f"layers must be even with scan, got {config.layers}.")
        return config

    def param_names(self, config: Config) -> Params:
        """Tree of the parameters, a PartitionSpec of logical dim names for each."""
        ends = {k: v for k, v in self.ends.items() if k != "head" or not config.tied}
        layers = _in_turn(config, self.layers)
        if config.scan:
            is_pair = len(self.layers) > 1
            loop = {"pairs": self.layers} if is_pair else {"layers": layers["layer_0"]}
            layers = jax.tree.map(lambda names: f"layers {names}", loop)
        return jax.tree.map(lambda text: PartitionSpec(*text.split()), ends | layers)

    def init(self, config: Config, key: jax.Array) -> Params:
        """Float32 parameters: scales 1, biases 0, others normal, std `INIT_STDDEV`."""
        c = config
        sizes = {"vocab": c.vocab, "position": c.seq, "type": 2, "heads": c.heads}
        sizes |= dict.fromkeys(("embed", "head_embed", "norm"), c.hidden)
        sizes |= dict.fromkeys(("experts", "gate_experts"), c.experts or 0)
        sizes |= {"kv_heads": c.kv_heads or c.heads, "head_dim": c.head_dim}
        sizes |= {"mlp": c.ffn or self.ffn(c.hidden)}
        sizes |= {"layers": c.layers // len(self.layers)}
        leaves, tree = jax.tree.flatten_with_path(self.param_names(c))
        keys = jax.random.split(key, len(leaves))

        def draw(path: Any, names: PartitionSpec, key: jax.Array) -> jax.Array:
            shape = [sizes[name] for name in names]
            if path[-1].key.endswith("bias"):
                return jnp.zeros(shape)
            if names[-1] == "norm":
                return jnp.ones(shape)
            return INIT_STDDEV * jax.random.normal(key, shape)

        drawn = [draw(*leaf, key) for leaf, key in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, drawn)


def run_layers(
    config: Config, params: Params, x: jax.Array, layers: Mapping[str, Layer]
) -> tuple[jax.Array, jax.Array]:
    """Runs `config.layers` layers, in a loop if `.scan`, rematerialized if `.remat`.

    Args:
      params: all parameters of the model.
      layers: functions of one round of layers, by the names in `Model.layers`.

    Returns:
      The last layer's output, and the sum of all penalties.
    """
    if config.remat:
        # Without a scan, a barrier must keep the compiler from merging recomputed
        # values with the first ones (CSE). A scan's backward pass is a loop of its own.
        layers = {
            name: jax.checkpoint(layer, prevent_cse=not config.scan)
            for name, layer in layers.items()
        }

    def run(
        x: jax.Array, params: Params, turns: Mapping[str, Layer]
    ) -> tuple[jax.Array, list[Any]]:
        penalties = []
        for name, layer in turns.items():
            x, penalty = inside(name, layer, params, x)
            penalties.append(penalty)
        return x, penalties

    if config.scan:
        loop = params.get("pairs") or {name: params["layers"] for name in layers}
        x, penalties = jax.lax.scan(lambda x, own: run(x, own, layers), x, loop)
    else:
        x, penalties = run(x, params, _in_turn(config, layers))
    every = map(jnp.sum, jax.tree.leaves(penalties))
    return x, sum(every, start=jnp.float32(0.0))


def _in_turn(config: Config, layers: Mapping[str, Any]) -> dict[str, Any]:
    """A round's layers repeated to `config.layers`, named "layer_0" and so on."""
    in_turn = zip(range(config.layers), itertools.cycle(layers.values()), strict=False)
    return {f"layer_{i}": layer for i, layer in in_turn}
