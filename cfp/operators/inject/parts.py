"""Policies for norms of flax, and for parts of GPT-2 and BERT as of HF.

Modules of HF's kind are known by the names of their classes, in linen
(``FlaxGPT2Attention``) and without the prefix in NNX, and by their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cfp.operators.inject.policy import (
    Parameters,
    Policy,
    Refused,
    Replacement,
    register_policy,
)


class _Norm(Policy):
    """A norm over the last dim, of these classes of linen and NNX."""

    kinds: tuple[type, ...] = ()
    parameters: tuple[str, ...] = ()

    def match(self, part: Any) -> bool:
        """By the class."""
        return type(part) in self.kinds

    def build(self, part: Any) -> Replacement:
        """The operator with the part's epsilon."""
        if part.reduction_axes != -1 or part.feature_axes != -1:
            raise Refused("does not normalise the last dim alone")
        if part.axis_name is not None:
            raise Refused("takes its statistics across devices")
        [operator] = self.operators
        for name in self.parameters:
            if not getattr(part, f"use_{name}"):
                raise Refused(f"has no {name}")
        eps, wanted = part.epsilon, part.dtype

        def replacement(parameters: Parameters, x: Array) -> Array:
            """Computes in one type for all, and gives the type that flax would give."""
            given = [x, *(parameters[name] for name in self.parameters)]
            result = wanted or jnp.result_type(*given)
            inner = jnp.result_type(x, result)
            made = self.call(operator, *(y.astype(inner) for y in given), eps=eps)
            return made.astype(result)

        return replacement

    def adapt(
        self, part: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The norm's input alone; masks are refused."""
        if len(args) != 1 or any(value is not None for value in kwargs.values()):
            raise Refused("is called with a mask")
        return args


@register_policy
class FlaxLayerNorm(_Norm):
    """`flax.linen.LayerNorm` and `flax.nnx.LayerNorm`."""

    operators = ("layer_norm",)
    kinds = (nn.LayerNorm, nnx.LayerNorm)
    parameters = ("scale", "bias")


@register_policy
class FlaxRMSNorm(_Norm):
    """`flax.linen.RMSNorm` and `flax.nnx.RMSNorm`."""

    operators = ("rms_norm",)
    kinds = (nn.RMSNorm, nnx.RMSNorm)
    parameters = ("scale",)


def _dense(parameters: Parameters, x: Array, dtype: Any, *, transposed: bool) -> Array:
    """Applies a dense layer."""
    kernel, bias = parameters["kernel"], parameters["bias"]
    kernel = kernel.T if transposed else kernel
    dtype = dtype or jnp.result_type(x, kernel, bias)
    return x.astype(dtype) @ kernel.astype(dtype) + bias.astype(dtype)


def _is_transposed(parameters: Parameters, hidden: int) -> bool:
    """True if kernels are [out, in], as in HF's GPT-2; refused if they are square."""
    rows, columns = parameters["kernel"].shape
    if rows == columns:
        raise Refused("has a square kernel, which may be transposed or not")
    return columns == hidden


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
        return type(part).__name__.removeprefix("Flax") == self.kind

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
        if asked := [n for n, x in given.items() if x is not None and x is not False]:
            raise Refused(f"is asked for {', '.join(asked)}")
        if mask is not None and not self.right_padded:
            raise Refused(
                "is called with a mask; right_padded=True says that masks are those of "
                "padding at the ends of sequences"
            )
        return hidden, mask


def _heads(x: Array, heads: int) -> Array:
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
            parameters: Parameters, hidden: Array, mask: Array | None
        ) -> tuple[Array]:
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

        def replacement(parameters: Parameters, hidden: Array, _: Any) -> Array:
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

    def build(self, part: Any) -> Replacement:
        """One projection, and attention to what is no padding."""
        heads, dtype = _number_of_heads(part), getattr(part, "dtype", None)

        def replacement(
            parameters: Parameters, hidden: Array, mask: Array | None
        ) -> tuple[Array]:
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
