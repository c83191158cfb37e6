"""Policies for flax norms, and parts of Hugging Face's (HF) GPT-2 and BERT.

HF modules are recognised by class name: ``FlaxGPT2Attention`` in linen, and
``GPT2Attention`` in NNX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cfp.operators.inject.policy import Policy
from cfp.operators.operator import Refused

_LAYER_NORM, _RMS_NORM = ("layer_norm", "scale", "bias"), ("rms_norm", "scale")


class FlaxNorm(Policy):
    """`LayerNorm` and `RMSNorm` of `flax.linen` and `flax.nnx`, over the last dim.

    Attributes:
        norms: {class: (operator, *names of its parameters)}.
    """

    norms: ClassVar = {
        nn.LayerNorm: _LAYER_NORM,
        nnx.LayerNorm: _LAYER_NORM,
        nn.RMSNorm: _RMS_NORM,
        nnx.RMSNorm: _RMS_NORM,
    }

    def match(self, part: Any) -> bool:
        """True for the exact classes in `norms`."""
        return type(part) in self.norms

    def build(self, part: Any) -> Callable[..., Any]:
        """Returns a replacement; refuses other dims, axis names, missing parameters."""
        operator, *names = next(
            norm for kind, norm in self.norms.items() if isinstance(part, kind)
        )
        if part.reduction_axes != -1 or part.feature_axes != -1:
            raise Refused("does not normalise the last dim alone")
        if part.axis_name is not None:
            raise Refused("takes its statistics across devices")
        for name in names:
            if not getattr(part, f"use_{name}"):
                raise Refused(f"has no {name}")

        def replacement(parameters: Any, x: Array, *, mask: Any = None) -> Array:
            """Refuses a mask; computes in one type; the result has flax's type."""
            if mask is not None:
                raise Refused("is called with mask=")
            given = [x, *(parameters[name] for name in names)]
            result = part.dtype or jnp.result_type(*given)
            inner = jnp.result_type(x, result)
            args = (y.astype(inner) for y in given)
            return self.call(operator, *args, eps=part.epsilon).astype(result)

        return replacement


def _dense(parameters: Any, x: Array, dtype: Any) -> tuple[Array, Array]:
    """Returns (x @ kernel, bias) in `dtype`; None: in the type that JAX promotes to."""
    kernel, bias = parameters["kernel"], parameters["bias"]
    dtype = dtype or jnp.result_type(x, kernel, bias)
    return x.astype(dtype) @ kernel.astype(dtype), bias.astype(dtype)


def _turned(parameters: Any, first: str, hidden: int) -> dict[str, Any]:
    """Transposes all kernels if `first`'s is [out, hidden]; refuses if it is square."""
    rows, columns = parameters[first]["kernel"].shape
    if rows == columns:
        raise Refused("has a square kernel of unknown order; register a policy")
    if columns != hidden:
        return parameters
    return {
        name: {**one, "kernel": one["kernel"].T} for name, one in parameters.items()
    }


class _OfHF(Policy):
    """Policy for an HF module, which has a `config`.

    Attributes:
        kind: class name, without the prefix "Flax".
        takes: names of its first positional arguments.
        drops: names of the dropout rates in its config.
    """

    kind = ""
    takes: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()

    def match(self, part: Any) -> bool:
        """True for the class name `kind`, with or without the prefix "Flax"."""
        return type(part).__name__.removeprefix("Flax") == self.kind

    def build(self, part: Any) -> Callable[..., Any]:
        """Returns a replacement; it may refuse calls with dropout, options or masks."""

        def replacement(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) > len(self.takes):
                raise Refused(f"gets {len(args)} positional arguments, not supported")
            given = {**dict(zip(self.takes, args, strict=False)), **kwargs}
            hidden, mask = given.pop("hidden_states"), given.pop("attention_mask", None)
            rates = [getattr(part.config, name, 0.0) for name in self.drops]
            if not given.pop("deterministic", True) and any(rates):
                raise Refused("uses dropout, which the operators do not support")
            asked = [n for n, x in given.items() if x is not None and x is not False]
            if asked:
                raise Refused(f"is called with {', '.join(asked)}, not supported")
            if mask is not None and not self.right_padded:
                raise Refused(
                    "is called with a mask; give right_padded=True if masks only mask "
                    "padding at the ends of sequences"
                )
            return self.compute(part, parameters, hidden, mask)

        return replacement

    def compute(self, part: Any, parameters: Any, hidden: Array, mask: Any) -> Any:
        """Returns the part's result, by operators."""
        raise NotImplementedError


def _heads(part: Any, *arrays: Array) -> list[Array]:
    """Splits last dims into [heads, head_dim] by the config's heads; else Refused."""
    for name in ("num_attention_heads", "n_head"):
        if isinstance(heads := getattr(part.config, name, None), int):
            return [x.reshape(*x.shape[:-1], heads, -1) for x in arrays]
    raise Refused("has no number of heads in its configuration")


class HFGPT2Attention(_OfHF):
    """Policy for the self-attention of a GPT-2."""

    kind = "GPT2Attention"
    takes = ("hidden_states", "key_value_states", "attention_mask", "deterministic")
    drops = ("attn_pdrop", "resid_pdrop")

    def compute(self, part: Any, parameters: Any, hidden: Array, mask: Any) -> Any:
        """Returns (result,); projections are plain products; the mask is not used."""
        if not getattr(part, "causal", True):
            raise Refused("is cross-attention")
        dtype = getattr(part, "dtype", None)
        # The mask is not needed: causal queries never see padding at the end.
        parameters = _turned(parameters, "c_attn", hidden.shape[-1])
        wide, bias = _dense(parameters["c_attn"], hidden, dtype)
        qkv = _heads(part, *jnp.split(wide + bias, 3, axis=-1))
        mixed = self.call("gpt_attention", *qkv).reshape(hidden.shape)
        made, bias = _dense(parameters["c_proj"], mixed, dtype)
        return (made + bias,)


class HFGPT2MLP(_OfHF):
    """Policy for the MLP of a GPT-2."""

    kind = "GPT2MLP"
    takes = ("hidden_states", "deterministic")
    drops = ("resid_pdrop",)

    def compute(self, part: Any, parameters: Any, hidden: Array, mask: Any) -> Any:
        """Returns the result: plain products, with the operator `bias_gelu` between."""
        activation = getattr(part.config, "activation_function", "gelu_new")
        if activation not in ("gelu_new", "gelu_pytorch_tanh"):
            raise Refused(f"has activation {activation}; bias_gelu has tanh GELU")
        dtype = getattr(part, "dtype", None)
        parameters = _turned(parameters, "c_fc", hidden.shape[-1])
        active = self.call("bias_gelu", *_dense(parameters["c_fc"], hidden, dtype))
        made, bias = _dense(parameters["c_proj"], active, dtype)
        return made + bias


class HFBertSelfAttention(_OfHF):
    """Policy for the self-attention of a BERT."""

    kind = "BertSelfAttention"
    takes = ("hidden_states", "attention_mask", "layer_head_mask", "key_value_states")
    drops = ("attention_probs_dropout_prob",)

    def compute(self, part: Any, parameters: Any, hidden: Array, mask: Any) -> Any:
        """Returns (result,); lengths are mask sums, or all tokens without a mask."""
        kernel, bias = (
            jnp.stack([parameters[name][leaf] for name in ("query", "key", "value")])
            for leaf in ("kernel", "bias")
        )
        inner = getattr(part, "dtype", None) or jnp.result_type(hidden, kernel, bias)
        given = (x.astype(inner) for x in (hidden, kernel, bias))
        qkv = _heads(part, *self.call("qkv_projection", *given))
        lengths = jnp.full(hidden.shape[:1], hidden.shape[1], jnp.int32)
        if mask is not None:
            lengths = mask.astype(jnp.int32).sum(-1)
        return (self.call("bert_attention", *qkv, lengths).reshape(hidden.shape),)


POLICIES = (FlaxNorm, HFGPT2Attention, HFGPT2MLP, HFBertSelfAttention)
