"""The policies that are there: norms of flax, and parts of GPT-2 and BERT as of HF.

Modules of HF's kind are known by the names of their classes, in linen
(``FlaxGPT2Attention``) and without the prefix in NNX, and by their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from cfp.operators.inject.policy import (
    Parameters,
    Policy,
    Refused,
    Replacement,
    register_policy,
)

# ------------------------------------------------------------------------------ norms


class _Norm(Policy):
    """A norm over the last dim."""

    def _check(self, part: Any) -> None:
        if part.reduction_axes != -1 or part.feature_axes != -1:
            raise Refused("does not normalise the last dim alone")
        if part.axis_name is not None:
            raise Refused("takes its statistics across devices")
        if not part.use_scale:
            raise Refused("has no scale")

    def adapt(
        self, part: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The norm's input alone; masks are refused."""
        if len(args) != 1 or any(value is not None for value in kwargs.values()):
            raise Refused("is called with a mask")
        return args


def _in_types(
    norm: Callable[..., jax.Array], wanted: Any, x: jax.Array, *parameters: jax.Array
) -> jax.Array:
    """Calls a norm with one type for all, and gives the type that flax would give."""
    result = wanted or jnp.result_type(x, *parameters)
    inner = jnp.result_type(x, result)
    return norm(*(y.astype(inner) for y in (x, *parameters))).astype(result)


@register_policy
class FlaxLayerNorm(_Norm):
    """`flax.linen.LayerNorm` and `flax.nnx.LayerNorm`."""

    operators = ("layer_norm",)

    def match(self, part: Any) -> bool:
        """Returns True for a part of this kind."""
        return type(part) in (nn.LayerNorm, nnx.LayerNorm)

    def build(self, part: Any) -> Replacement:
        """The operator with the part's epsilon."""
        self._check(part)
        if not part.use_bias:
            raise Refused("has no bias")
        eps, wanted = part.epsilon, part.dtype

        def replacement(parameters: Parameters, x: jax.Array) -> jax.Array:
            def norm(*args: jax.Array) -> jax.Array:
                return self.call("layer_norm", *args, eps=eps)

            return _in_types(norm, wanted, x, parameters["scale"], parameters["bias"])

        return replacement


@register_policy
class FlaxRMSNorm(_Norm):
    """`flax.linen.RMSNorm` and `flax.nnx.RMSNorm`."""

    operators = ("rms_norm",)

    def match(self, part: Any) -> bool:
        """Returns True for a part of this kind."""
        return type(part) in (nn.RMSNorm, nnx.RMSNorm)

    def build(self, part: Any) -> Replacement:
        """The operator with the part's epsilon."""
        self._check(part)
        eps, wanted = part.epsilon, part.dtype

        def replacement(parameters: Parameters, x: jax.Array) -> jax.Array:
            def norm(*args: jax.Array) -> jax.Array:
                return self.call("rms_norm", *args, eps=eps)

            return _in_types(norm, wanted, x, parameters["scale"])

        return replacement


# ------------------------------------------------------------------- modules as of HF


def _dense(
    parameters: Parameters, x: jax.Array, dtype: Any, *, transposed: bool
) -> jax.Array:
    """Applies a dense layer."""
    kernel, bias = parameters["kernel"], parameters["bias"]
    kernel = kernel.T if transposed else kernel
    dtype = dtype or jnp.result_type(x, kernel, bias)
    return x.astype(dtype) @ kernel.astype(dtype) + bias.astype(dtype)


def _is_transposed(parameters: Parameters, hidden: int) -> bool:
    """Returns True if kernels are [out, in], as in HF's GPT-2 in linen.

    Raises:
        Refused: it is square, and does not tell.
    """
    rows, columns = parameters["kernel"].shape
    if rows == columns:
        raise Refused("has a square kernel, which may be transposed or not")
    return columns == hidden


def _kind(part: Any) -> str:
    return type(part).__name__.removeprefix("Flax")


def _is_set(value: Any) -> bool:
    """Returns True if an option of a call is given, and is not off."""
    return value is not None and value is not False


class _OfHF(Policy):
    """A module with a configuration, called like those of HF.

    Attributes:
        kind: the class's name.
        takes: names of the arguments that it takes by place.
        drops: names of the rates of dropout in its configuration.
    """

    kind = ""
    takes: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()

    def match(self, part: Any) -> bool:
        """By the name of the class."""
        return _kind(part) == self.kind

    def adapt(
        self, part: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The hidden state and the mask; what the operators have not is refused."""
        given = {**dict(zip(self.takes, args, strict=False)), **kwargs}
        hidden, mask = given.pop("hidden_states"), given.pop("attention_mask", None)
        deterministic = given.pop("deterministic", True)
        rates = [getattr(part.config, name, 0.0) for name in self.drops]
        if not deterministic and any(rates):
            raise Refused("drops out, which fused attention does not")
        asked = [name for name, value in given.items() if _is_set(value)]
        if asked:
            raise Refused(f"is asked for {', '.join(asked)}")
        if mask is not None and not self.choices.right_padded:
            raise Refused(
                "is called with a mask; right_padded=True says that masks are those of "
                "padding at the ends of sequences"
            )
        return hidden, mask


def _heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, -1)


def _number_of_heads(part: Any) -> int:
    for name in ("num_attention_heads", "n_head"):
        if isinstance(found := getattr(part.config, name, None), int):
            return found
    raise Refused("has no number of heads in its configuration")


@register_policy
class HFGPT2Attention(_OfHF):
    """Self-attention of a GPT-2."""

    kind = "GPT2Attention"
    operators = ("gpt_attention",)
    takes = ("hidden_states", "key_value_states", "attention_mask", "deterministic")
    drops = ("attn_pdrop", "resid_pdrop")

    def build(self, part: Any) -> Replacement:
        """Both projections as they are, and the operator between them."""
        heads, dtype = _number_of_heads(part), getattr(part, "dtype", None)
        if not getattr(part, "causal", True):
            raise Refused("is cross-attention")

        def replacement(
            parameters: Parameters, hidden: jax.Array, mask: jax.Array | None
        ) -> tuple[jax.Array]:
            # Of what sees only the past, padding at the ends is no part.
            turned = _is_transposed(parameters["c_attn"], hidden.shape[-1])
            wide = _dense(parameters["c_attn"], hidden, dtype, transposed=turned)
            query, key, value = (_heads(x, heads) for x in jnp.split(wide, 3, axis=-1))
            mixed = self.call("gpt_attention", query, key, value)
            merged = mixed.reshape(hidden.shape)
            made = _dense(parameters["c_proj"], merged, dtype, transposed=turned)
            return (made,)

        return replacement


@register_policy
class HFGPT2MLP(_OfHF):
    """The MLP of a GPT-2."""

    kind = "GPT2MLP"
    operators = ("bias_gelu",)
    takes = ("hidden_states", "deterministic")
    drops = ("resid_pdrop",)

    def build(self, part: Any) -> Replacement:
        """The bias of the first half goes into the activation."""
        activation = getattr(part.config, "activation_function", "gelu_new")
        if activation not in ("gelu_new", "gelu_pytorch_tanh"):
            raise Refused(f"activates by {activation}, and bias_gelu by tanh")
        dtype = getattr(part, "dtype", None)

        def replacement(parameters: Parameters, hidden: jax.Array, _: Any) -> jax.Array:
            up, bias = parameters["c_fc"]["kernel"], parameters["c_fc"]["bias"]
            turned = _is_transposed(parameters["c_fc"], hidden.shape[-1])
            up = up.T if turned else up
            inner = dtype or jnp.result_type(hidden, up, bias)
            wide = hidden.astype(inner) @ up.astype(inner)
            active = self.call("bias_gelu", wide, bias.astype(inner))
            return _dense(parameters["c_proj"], active, dtype, transposed=turned)

        return replacement


@register_policy
class HFBertSelfAttention(_OfHF):
    """Self-attention of a BERT: its three projections become one."""

    kind = "BertSelfAttention"
    operators = ("qkv_projection", "bert_attention")
    takes = ("hidden_states", "attention_mask", "layer_head_mask", "key_value_states")
    drops = ("attention_probs_dropout_prob",)
    _names = ("query", "key", "value")

    def to_injected(self, parameters: Parameters) -> Parameters:
        """Three kernels and biases become a stack of each."""
        parts = [parameters[name] for name in self._names]
        return {
            "qkv": {
                leaf: jnp.stack([part[leaf] for part in parts])
                for leaf in ("kernel", "bias")
            }
        }

    def to_original(self, parameters: Parameters) -> Parameters:
        """And a stack three again."""
        stacked = parameters["qkv"]
        return {
            name: {leaf: stacked[leaf][i] for leaf in ("kernel", "bias")}
            for i, name in enumerate(self._names)
        }

    def build(self, part: Any) -> Replacement:
        """One projection, and attention to what is no padding."""
        heads, dtype = _number_of_heads(part), getattr(part, "dtype", None)

        def replacement(
            parameters: Parameters, hidden: jax.Array, mask: jax.Array | None
        ) -> tuple[jax.Array]:
            kernel, bias = parameters["qkv"]["kernel"], parameters["qkv"]["bias"]
            inner = dtype or jnp.result_type(hidden, kernel, bias)
            stacked = self.call(
                "qkv_projection", *(x.astype(inner) for x in (hidden, kernel, bias))
            )
            query, key, value = (_heads(x, heads) for x in stacked)
            if mask is None:
                lengths = jnp.full(hidden.shape[:1], hidden.shape[1], jnp.int32)
            else:
                lengths = mask.astype(jnp.int32).sum(-1)
            mixed = self.call("bert_attention", query, key, value, lengths)
            return (mixed.reshape(hidden.shape),)

        return replacement
