"""Operators (such as layer norm), their implementations and their oracles.

An operator is called like a function. It checks the shapes of its arguments, and then
calls the given implementation, or the first that accepts the arguments. If every
implementation refuses, the error lists each reason.

An implementation is a function of arrays: a plain formula, or a call of a library. An
oracle is the plain formula that others are compared with.

Statistics and softmaxes are computed in float32 for arguments of any type. Queries,
keys and values are [batch, tokens, heads, head_dim]. An implementation raises `Refused`
for arguments or options that it does not support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import pi, sqrt
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from cfp.errors import CfpError, known_names
from cfp.kernels.problem import problem_of
from cfp.kernels.registry import KERNELS
from cfp.printable import counted


class Refused(Exception):
    """Error: an implementation or policy refuses arguments, device or flax part."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an operator.

    Attributes:
        dims: names or sizes, such as "* 3 h"; the star stands for any leading dims.
        kind: values of random samples. "float" is normal. The others are integers:
            "below" (from 0, less than the dim `below`), "lengths" (1 to the dim
            `below`), "groups" (sizes that sum to the dim `below`), "key" (key data).
        below: name of a dim, see `kind`.
        around: mean of random floats.
        spread: standard deviation of random floats. "fan_in" is shape[-2] ** -0.5, and
            "fan_last" is shape[-1] ** -0.5.
    """

    name: str
    dims: str
    _: KW_ONLY
    kind: str = "float"
    below: str = ""
    around: float = 0.0
    spread: float | str = 1.0

    def deviation(self, shape: Sequence[int]) -> float:
        """Standard deviation of a random sample with this shape."""
        if isinstance(self.spread, str):
            return shape[{"fan_in": -2, "fan_last": -1}[self.spread]] ** -0.5
        return self.spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator and its implementations; call it like a function.

    Attributes:
        summary: its result, in one line.
        arguments: in the order of a call.
        oracle: plain formula that implementations are compared with, in float32.
        implementations: functions by name, preferred first. Each takes the arguments
            and options, or raises `Refused`.
        flops: function of {dim name: size} to the floating-point operations of the
            forward contractions; 0 for operators without contractions.
        options: names and defaults of keyword options.
    """

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    oracle: Callable[..., Array]
    implementations: Mapping[str, Callable[..., Array]]
    flops: Callable[[Mapping[str, int]], float] = lambda dims: 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, *args: Any, implementation: str | None = None, **options: Any
    ) -> Array:
        """Returns the result of `by_first`, without the implementation's name."""
        return self.by_first(*args, implementation=implementation, **options)[1]

    def by_first(
        self, *args: Any, implementation: str | None = None, **options: Any
    ) -> tuple[str, Array]:
        """Returns (name, result) of `implementation`, or of the first that accepts.

        Args:
            args: arrays, in the order of `arguments`.
            implementation: name of the implementation to call; by default each is
                tried in order.
            options: replace defaults of the attribute `options`.

        Raises:
            CfpError: a name is unknown, shapes or their number do not fit, or no tried
                implementation accepts.
        """
        names = [one.name for one in self.arguments]
        if len(args) != len(names):
            raise CfpError(
                f"{self.name} takes {counted(len(names), 'argument', 'arguments')}, "
                f"{', '.join(names)}: got {len(args)}."
            )
        self.check_shapes(args)
        for name in options:
            known(f"option of {self.name}", name, self.options)
        if implementation:
            known(
                f"implementation of {self.name}", implementation, self.implementations
            )
        reasons = []
        for name in (implementation,) if implementation else self.implementations:
            try:
                call = self.implementations[name]
                return name, call(*args, **{**self.options, **options})
            except Refused as reason:
                reasons.append(f"{name}: {reason}")
        raise CfpError(
            f"No implementation of {self.name} takes these arguments. "
            f"{'; '.join(reasons)}."
        )

    def check_shapes(self, args: Sequence[Any]) -> None:
        """Checks the arguments' shapes against the declared dims.

        Raises:
            CfpError: a number of dims or fixed size is wrong, or a name has two sizes.
        """
        found: dict[str, Any] = {}
        for one, arg in zip(self.arguments, args, strict=True):
            names, sizes = one.dims.split(), list(jnp.shape(arg))
            known_sizes = (f"{n}={found[n]}" if n in found else n for n in names)
            message = (
                f"The {one.name} of {self.name} must be [{', '.join(known_sizes)}], "
                f"got {sizes}."
            )
            if names[0] == "*":
                leading = max(len(sizes) - len(names) + 1, 0)
                sizes = [tuple(sizes[:leading]), *sizes[leading:]]
            if len(sizes) != len(names):
                raise CfpError(message)
            for name, size in zip(names, sizes, strict=True):
                if size != (int(name) if name.isdigit() else found.get(name, size)):
                    raise CfpError(message)
                found[name] = size


def known(what: str, name: str, names: Iterable[str]) -> None:
    """Raises CfpError if `name` is not in `names`; the error calls it a `what`."""
    if name not in (all_names := list(names)):
        there = known_names(name, all_names)
        raise CfpError(f"There is no {what} called {name!r}. {there}")


_LEAST = -1e30  # Finite: a row without any key has no not-a-number.


def layer_norm(x: Array, scale: Array, bias: Array, *, eps: float) -> Array:
    y = x.astype(jnp.float32)
    centred = y - y.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(variance + eps)
    return (normal * scale + bias).astype(x.dtype)


def layer_norm_jax_nn(x: Array, scale: Array, bias: Array, *, eps: float) -> Array:
    y = jax.nn.standardize(x.astype(jnp.float32), epsilon=eps)
    return (y * scale + bias).astype(x.dtype)


def rms_norm(x: Array, scale: Array, *, eps: float) -> Array:
    y = x.astype(jnp.float32)
    mean = jnp.square(y).mean(-1, keepdims=True)
    return (y * jax.lax.rsqrt(mean + eps) * scale).astype(x.dtype)


def dropout_add_layer_norm(
    x, residual, scale, bias, key, *, rate: float, eps: float, norm=layer_norm
) -> Array:
    if not 0.0 <= rate < 1.0:
        raise Refused(f"rate={rate} is not in [0, 1)")
    keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 1.0 - rate, x.shape)
    dropped = jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
    return norm(residual + dropped, scale, bias, eps=eps)


def bias_gelu(x: Array, bias: Array) -> Array:
    y = x + bias
    inner = sqrt(2 / pi) * (y + 0.044715 * y * y * y)
    return 0.5 * y * (1 + jnp.tanh(inner))


def bias_gelu_jax_nn(x: Array, bias: Array) -> Array:
    return jax.nn.gelu(x + bias, approximate=True)


def swiglu(x: Array, gate: Array, up: Array) -> Array:
    return jax.nn.silu(x @ gate) * (x @ up)


def swiglu_rematerialized(x: Array, gate: Array, up: Array) -> Array:
    # Stores the matrix products; the elementwise values are recomputed.
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(swiglu, policy=policy)(x, gate, up)


def length_mask(lengths: Array, keys: int) -> Array:
    """[batch] -> [batch, 1, 1, keys]: True for keys before a sequence's length."""
    return jnp.arange(keys) < lengths[:, None, None, None]


def causal_mask(queries: int, keys: int) -> Array:
    """[queries, keys]: True for keys up to a query's place; the last sees all keys."""
    return jnp.tril(jnp.ones((queries, keys), bool), keys - queries)


def softmax(scores: Array, seen: Array | None = None) -> Array:
    """Softmax over the last dim, computed in float32; scores not `seen` are masked."""
    y = scores.astype(jnp.float32)
    y = y if seen is None else jnp.where(seen, y, _LEAST)
    powers = jnp.exp(y - jax.lax.stop_gradient(y.max(-1, keepdims=True)))
    return (powers / powers.sum(-1, keepdims=True)).astype(scores.dtype)


def softmax_jax_nn(scores: Array, seen: Array | None = None) -> Array:
    """Like `softmax`, by `jax.nn`, but a row with no score `seen` gives zeros."""
    return jax.nn.softmax(scores.astype(jnp.float32), where=seen).astype(scores.dtype)


def qkv_separate(x: Array, kernel: Array, bias: Array) -> Array:
    return jnp.stack([x @ kernel[i] + bias[i] for i in range(3)])


def qkv_fused(x: Array, kernel: Array, bias: Array) -> Array:
    wide = jnp.concatenate([kernel[0], kernel[1], kernel[2]], axis=1)
    made = x @ wide + bias.reshape(-1)
    return jnp.stack(jnp.split(made, 3, axis=-1))


def qkv_batched(x: Array, kernel: Array, bias: Array) -> Array:
    ones = (1,) * (x.ndim - 1)
    made = jnp.einsum("...h,xhk->x...k", x, kernel)
    return made + bias.reshape(3, *ones, -1)


def _angles(x: Array, base: float) -> tuple[Array, Array]:
    """Cosine and sine of rotary angles, each [tokens, 1, head_dim / 2]."""
    half = x.shape[-1] // 2
    if x.shape[-1] % 2:
        raise Refused(f"the head's width {x.shape[-1]} is odd")
    rates = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * rates
    return jnp.cos(angles), jnp.sin(angles)


def rotary(x: Array, *, base: float) -> Array:
    cos, sin = _angles(x, base)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rotary_complex(x: Array, *, base: float) -> Array:
    cos, sin = _angles(x, base)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jax.lax.complex(left, right) * jax.lax.complex(cos, sin)
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


def take(table: Array, tokens: Array) -> Array:
    return jnp.take(table, tokens, axis=0)


def all_scores(query, key, value, *, mask=None, bias=None, scale=None) -> Array:
    """Attention by plain einsums, which store the whole score matrix."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum(
        "bqnd,bknd->bnqk", query, key, preferred_element_type=jnp.float32
    )
    scores = scores * factor
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, _LEAST)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bnqk,bknd->bqnd", weights, value)


def attention_jax_nn(
    query, key, value, *, implementation: Literal["xla", "cudnn"], **how
) -> Array:
    """Attention by `jax.nn.dot_product_attention`; `how` are its other options."""
    given = {"causal": how.get("is_causal", False)}
    given |= {name: how.get(name) for name in ("bias", "scale")}
    try:
        problem = problem_of(query, key, value, **given)
    except CfpError as error:
        raise Refused(str(error)) from error
    if implementation == "cudnn":
        if reason := KERNELS["cudnn"].module.refusal(problem, jax.default_backend()):
            raise Refused(reason)
    return jax.nn.dot_product_attention(
        query, key, value, implementation=implementation, **how
    )


def one_by_one(x: Array, kernels: Array, groups: Array) -> Array:
    """Multiplies all rows by each group's kernel, and keeps the rows of the group."""
    ends = jnp.cumsum(groups)
    rows = jnp.arange(x.shape[0])[:, None]
    found = jnp.zeros((x.shape[0], kernels.shape[2]), x.dtype)
    for i in range(kernels.shape[0]):
        mine = (rows < ends[i]) & (rows >= ends[i] - groups[i])
        found = jnp.where(mine, x @ kernels[i], found)
    return found


def _gates(scores: Array, choices: int) -> tuple[Array, Array]:
    """Softmax over the best scores, and indices of these experts: [tokens, choices]."""
    if not 1 <= choices <= scores.shape[1]:
        raise Refused(f"choices={choices}; give 1 to {scores.shape[1]}")
    best, experts = jax.lax.top_k(scores.astype(jnp.float32), choices)
    return jax.nn.softmax(best), experts


def every_expert(x, scores, up, down, *, choices: int) -> Array:
    """Mixture of experts: every expert computes every token, unchosen ones weigh 0."""
    weights, experts = _gates(scores, choices)
    hot = jax.nn.one_hot(experts, up.shape[0], dtype=jnp.float32)
    share = jnp.einsum("tk,tke->te", weights, hot)
    inner = jax.nn.gelu(jnp.einsum("th,ehf->etf", x, up))
    made = jnp.einsum("etf,efh->eth", inner, down)
    mixed = jnp.einsum("te,eth->th", share, made.astype(jnp.float32))
    return mixed.astype(x.dtype)


def sorted_experts(x, scores, up, down, *, choices: int) -> Array:
    """Mixture of experts by `ragged_dot` over tokens sorted by expert."""
    weights, experts = _gates(scores, choices)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    groups = jnp.bincount(experts.reshape(-1), length=up.shape[0]).astype(jnp.int32)
    inner = jax.nn.gelu(jax.lax.ragged_dot(x[order // choices], up, groups))
    made = jax.lax.ragged_dot(inner, down, groups)
    back = made[jnp.argsort(order)].reshape(x.shape[0], choices, -1)
    mixed = jnp.einsum("tk,tkh->th", weights, back.astype(jnp.float32))
    return mixed.astype(x.dtype)


def cross_entropy(logits: Array, labels: Array) -> Array:
    y = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(y, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(y, axis=-1) - chosen


def cross_entropy_one_hot(logits: Array, labels: Array) -> Array:
    found = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.sum(found * jax.nn.one_hot(labels, logits.shape[-1]), axis=-1)


def linear_cross_entropy(
    x: Array, kernel: Array, labels: Array, *, chunks: int
) -> Array:
    logits = jnp.einsum("th,vh->tv", x, kernel, preferred_element_type=jnp.float32)
    return cross_entropy(logits, labels).mean()


@jax.checkpoint
def _part(x: Array, kernel: Array, first: Array, labels: Array) -> tuple[Array, Array]:
    """Logsumexp over part of the vocabulary, and the labels' logits, each [tokens].

    `x` is [tokens, hidden], `kernel` [part, hidden]; labels outside the part, which
    begins at word `first`, give logit 0.
    """
    logits = jnp.einsum("th,vh->tv", x, kernel, preferred_element_type=jnp.float32)
    place = labels - first
    inside = (place >= 0) & (place < kernel.shape[0])
    place = jnp.where(inside, place, 0)
    chosen = jnp.take_along_axis(logits, place[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1), jnp.where(inside, chosen, 0.0)


def chunked_vocabulary(x, kernel, labels, *, chunks: int) -> Array:
    if not 1 <= chunks <= kernel.shape[0]:
        raise Refused(f"chunks={chunks}; give 1 to {kernel.shape[0]}, the vocabulary")
    size = kernel.shape[0] // chunks
    whole = size * chunks

    def step(_: None, part: tuple[Array, Array]):
        return None, _part(x, *part, labels)

    parts = kernel[:whole].reshape(chunks, size, kernel.shape[1])
    _, (sums, chosen) = jax.lax.scan(step, None, (parts, jnp.arange(chunks) * size))
    chosen = chosen.sum(0)
    if whole < kernel.shape[0]:
        rest, also = _part(x, kernel[whole:], jnp.asarray(whole), labels)
        sums, chosen = jnp.concatenate([sums, rest[None]]), chosen + also
    return (jax.nn.logsumexp(sums, axis=0) - chosen).mean()
