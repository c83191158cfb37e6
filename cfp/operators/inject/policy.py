"""Policies: the parts of a model to replace by operators.

A part is a module of flax (linen or NNX). For each the first policy that matches makes
the replacement.

There are policies for norms of flax, and parts of GPT-2 and BERT as of HF. Modules of
HF's kind are known by the names of their classes, in linen (``FlaxGPT2Attention``) and
without the prefix in NNX, and by their parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cfp.errors import CfpError
from cfp.operators import find

# A part's parameters: nested dicts of arrays.
Parameters = dict[str, Any]
# Takes the parameters of the replacement, and what `adapt` made of a call.
Replacement = Callable[..., Any]


class PolicyError(CfpError):
    """A policy that cannot be right, or an injection that replaced nothing."""


class Refused(Exception):
    """A part, or a call of it, that a policy matches but does not replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Options of a whole injection.

    Attributes:
        implementations: names by operator; the first that takes the arguments for the
            others.
        right_padded: whether masks of padding that are given to attention mask ends of
            sequences only.
    """

    implementations: Mapping[str, str] = field(default_factory=dict)
    right_padded: bool = False

    def __post_init__(self) -> None:
        for name, implementation in self.implementations.items():
            find(name).implementation(implementation)


class Policy(ABC):
    """The replacement of one kind of part.

    A policy is made once for an injection. It must not keep arrays: a replacement gets
    its parameters when it is called.

    Attributes:
        operators: names of the operators that it puts in.
    """

    operators: tuple[str, ...] = ()

    def __init__(self, choices: Choices):
        self.choices = choices
        self.used: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The name in reports."""
        return type(self).__name__

    @abstractmethod
    def match(self, part: Any) -> bool:
        """Returns True if the policy replaces parts like this one."""

    @abstractmethod
    def build(self, part: Any) -> Replacement:
        """The replacement: a function of parameters and adapted arguments.

        Raises:
            Refused: not this part, with the reason.
        """

    def to_injected(self, parameters: Parameters) -> Parameters:
        """The replacement's parameters from the part's; by default the same."""
        return parameters

    def to_original(self, parameters: Parameters) -> Parameters:
        """The part's parameters from the replacement's; by default the same."""
        return parameters

    def adapt(
        self, part: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Translates a part's arguments to those of its replacement.

        Raises:
            Refused: not this call, with the reason.
        """
        if kwargs:
            raise Refused(f"is called with {', '.join(kwargs)}")
        return args

    def call(self, operator: str, *args: Any, **options: Any) -> Array:
        """Calls an operator by the implementation that the user chose."""
        found = find(operator)
        wanted = self.choices.implementations.get(operator)
        chosen = found.choose(*args, implementation=wanted, **options)
        self.used[operator] = chosen.name
        return chosen.call(*args, **{**found.options, **options})

    def implementations_text(self) -> str:
        """The operators with the implementations that were taken or are wanted."""
        taken = {**self.choices.implementations, **self.used}
        return ", ".join(
            f"{name} by {taken.get(name, 'the first that takes the arguments')}"
            for name in self.operators
        )


_P = TypeVar("_P", bound=type[Policy])
_registered: list[type[Policy]] = []


def register_policy(policy: _P) -> _P:
    """Adds a policy to those that every injection uses; the newest is asked first.

    Raises:
        PolicyError: it is no policy, or names an operator that there is not.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise PolicyError(
            f"{policy!r} is no policy.",
            expected="a class derived from cfp.operators.inject.Policy",
            got=type(policy).__name__,
            attempt="class MyPolicy(Policy): with match and build",
        )
    for name in policy.operators:
        find(name)
    _registered.insert(0, policy)
    return policy


def unregister_policy(policy: type[Policy]) -> None:
    """Takes a policy out again."""
    _registered.remove(policy)


def registered() -> tuple[type[Policy], ...]:
    """All registered policies, in the order in which they are asked."""
    return tuple(_registered)


def paths(parameters: Parameters) -> dict[str, Any]:
    """Leaves by their paths, such as "query/kernel"."""
    found, _ = jax.tree_util.tree_flatten_with_path(parameters)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in found
    }


def check_mapping(policy: Policy, parameters: Parameters, where: str) -> None:
    """Sees that a policy maps all parameters there and back; computes nothing.

    Args:
        where: the part's path, for the message.

    Raises:
        PolicyError: one is dropped, added, or comes back in another shape or type.
    """
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parameters
    )
    before = paths(abstract)
    try:
        there = jax.eval_shape(policy.to_injected, abstract)
        back = jax.eval_shape(policy.to_original, there)
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyError(
            f"{policy.name} cannot map the parameters of {where}.",
            expected=", ".join(before),
            got=f"{type(error).__name__}: {error}",
            attempt="to_injected takes the part's parameters, to_original gives "
            "them back",
        ) from error
    after = paths(back)
    lost = [
        name
        for name, leaf in before.items()
        if name not in after
        or (after[name].shape, after[name].dtype) != (leaf.shape, leaf.dtype)
    ]
    added = [name for name in after if name not in before]
    if lost or added:
        raise PolicyError(
            f"{policy.name} "
            + (f"drops {', '.join(lost)}" if lost else f"adds {', '.join(added)}")
            + f" of {where}.",
            expected=f"to_original(to_injected(p)) has {_shapes(before)}",
            got=_shapes(after) or "nothing",
            attempt="map every parameter both ways, so that checkpoints can be loaded",
        )


def _shapes(leaves: Mapping[str, Any]) -> str:
    return ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in leaves.items())


def first_match(policies: Sequence[Policy], part: Any) -> Policy | None:
    """The policy that replaces a part; None if none does."""
    return next((policy for policy in policies if policy.match(part)), None)


# ------------------------------------------------------------------------------ norms


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


# ------------------------------------------------------------------- modules as of HF


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
