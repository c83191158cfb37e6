"""`cfp.attention`: attention by a chosen kernel and strategy, on one device or many.

If the devices do not divide the heads, key heads may be copied, and heads of zeros
may be added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from cfp.errors import CfpError
from cfp.kernels.problem import (
    HEADS,
    ROLES,
    ULYSSES,
    AttentionProblem,
    AttentionStrategy,
    Given,
    Mask,
    Window,
    padded,
    problem_of,
    segments_of,
)
from cfp.kernels.registry import KERNELS, Kernel
from cfp.kernels.ring import Ring, from_zigzag, spread_attention, to_zigzag
from cfp.program.memory import auto_mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFit:
    """Padding and repetition that make heads divisible by a number of parts.

    Attributes:
      repeats: times that each key and value head occurs, 1 if not copied.
      padded_kv_heads: number of key and value heads, copies and zeros included.
      group: query heads per key head, after copying.
    """

    repeats: int
    padded_kv_heads: int
    group: int

    @property
    def heads(self) -> int:
        """Number of query heads, zeros included."""
        return self.padded_kv_heads * self.group

    def queries(self, q: Array) -> Array:
        """Pads [batch, tokens, heads, head_dim] with heads of zeros."""
        return padded(q, {2: self.heads})

    def keys(self, k: Array) -> Array:
        """Repeats and pads the heads of [batch, tokens, kv_heads, head_dim]."""
        if self.repeats > 1:
            # In float32, so that the gradients of copies are summed in it.
            wide = jnp.repeat(k.astype(jnp.float32), self.repeats, axis=2)
            k = wide.astype(k.dtype)
        return padded(k, {2: self.padded_kv_heads})


def fit_heads(heads: int, kv_heads: int, parts: int) -> HeadFit:
    """Finds the padding with the fewest heads, of queries and keys together.

    `parts` divides the padded key heads. All key heads get the same number of copies;
    heads of zeros fill up the rest. `heads`, of queries, is a multiple of kv_heads.
    """
    group = heads // kv_heads
    fits = [
        HeadFit(
            repeats=repeats,
            padded_kv_heads=-(-kv_heads * repeats // parts) * parts,
            group=group // repeats,
        )
        for repeats in range(1, group + 1)
        if group % repeats == 0
    ]
    return min(fits, key=lambda fit: (fit.heads + fit.padded_kv_heads, fit.heads))


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: Window = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    key_lengths: Array | None = None,
    bias: Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    mesh: Mesh | None = None,
    strategy: Given = None,
    implementation: str | None = None,
    zigzag_tokens: bool = False,
) -> Array:
    """Computes attention by a chosen kernel and strategy, on one device or a mesh.

    Differentiable in q, k, v and bias. Call it inside `jax.jit`: outside, each call
    may compile again. If devices do not divide heads or tokens, key heads are copied,
    heads of zeros are added, and tokens are padded and masked. The batch is not padded.

    Args:
      q: [batch, queries, heads, head_dim].
      k: [batch, keys, kv_heads, head_dim]; kv_heads divides heads, and neighbouring
        query heads share a key head.
      v: like k.
      causal: True hides keys after a query's position.
      window: number of visible positions (left, right) besides the query's own; None
        is unbounded. One number is for both sides.
      segment_ids: [batch, tokens] int32: a query sees only keys of its own id. A pair
        has the ids of queries and of keys.
      key_lengths: [batch] integers: number of keys of each sequence, at least one; the
        others are padding. Not together with segment ids.
      bias: [1 or batch, 1 or heads, queries, keys] floats, added after the soft cap.
        cuDNN needs the dtype of q; "chunked" and sharded keys take none.
      softcap: scores become softcap * tanh(scores / softcap).
      scale: factor of the products of queries and keys; default 1 / sqrt(head_dim).
      mesh: the devices; a strategy needs it.
      strategy: roles of mesh axes, such as ``{"x": "ring"}``, or one role if the mesh
        has one axis; `cfp.attention_options` lists them. None: XLA shards the kernel.
      implementation: by default the first of "cudnn", "chunked" and "xla" that can
        compute it; on CPUs "xla".
      zigzag_tokens: True if tokens are in zigzag order already (`cfp.kernels.ring`).
        Otherwise a zigzag strategy converts them here and back, which takes time.

    Returns:
      The output, with the shape and dtype of q.

    Raises:
      CfpError: arguments do not fit, or no allowed implementation can compute them.
    """
    problem = problem_of(
        q,
        k,
        v,
        causal=causal,
        window=window,
        segment_ids=segment_ids,
        key_lengths=key_lengths,
        bias=bias,
        softcap=softcap,
        scale=scale,
    )
    # Auto axes: the arguments may have any sharding.
    mesh = mesh and auto_mesh(mesh)
    choice = _choose(problem, mesh, strategy, implementation, zigzag_tokens)
    ids = segments_of(segment_ids)
    if key_lengths is not None and choice.kernel.any_positions:
        is_key = jnp.arange(k.shape[1]) < key_lengths[:, None]
        ids = jnp.zeros(q.shape[:2], jnp.int32), is_key.astype(jnp.int32) - 1
        key_lengths = None
    return choice.run(q, k, v, *ids, bias, key_lengths)


def _choose(
    problem: AttentionProblem,
    mesh: Mesh | None,
    given: Given,
    implementation: str | None,
    zigzag_tokens: bool,
) -> _Choice:
    """Reads the strategy, chooses the first kernel that can; CfpError if none can."""
    strategy = AttentionStrategy.of(given, dict(mesh.shape) if mesh is not None else {})
    # On CPUs plain attention, which keeps the scores, is the default.
    usual = ("xla",) if platform_of(mesh) == "cpu" else tuple(KERNELS)
    names = (implementation,) if implementation else usual
    if unknown := [name for name in names if name not in KERNELS]:
        raise CfpError(
            f"There is no implementation of attention called {', '.join(unknown)}. "
            f"Give one of {', '.join(KERNELS)}."
        )
    if zigzag_tokens and not strategy.zigzag:
        raise CfpError(
            f"The strategy {strategy} takes no tokens in zigzag order. Give one with "
            '"zigzag", or, for tokens in natural order, zigzag_tokens=False.'
        )
    reasons = []
    for name in names:
        kernel = KERNELS[name]
        reason = refusal(problem, strategy, kernel, platform_of(mesh))
        if reason is None:
            return _Choice(
                problem=problem,
                mesh=mesh,
                strategy=strategy,
                kernel=kernel,
                heads=_fit(problem, strategy),
                converts=not zigzag_tokens,
            )
        reasons.append(f"{name}: {reason}")
    raise CfpError(
        f"This attention cannot be computed with strategy {strategy}: "
        f"{'; '.join(reasons)}. cfp.attention_options(...) lists every strategy "
        "and implementation, with reasons."
    )


def platform_of(mesh: Mesh | None) -> str:
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return jax.default_backend()


def refusal(
    problem: AttentionProblem,
    strategy: AttentionStrategy,
    kernel: Kernel,
    platform: str,
) -> str | None:
    """Reason why a strategy or kernel cannot compute a problem; None if both can."""
    filled = replace(problem, padded_keys=_pads_keys(problem, strategy))
    reason = strategy.refusal(filled, kernel)
    return reason or kernel.module.refusal(_local(filled, strategy), platform)


def _fit(problem: AttentionProblem, strategy: AttentionStrategy) -> HeadFit:
    parts = strategy.parts(HEADS, ULYSSES)
    return fit_heads(problem.heads, problem.kv_heads, parts)


def _pads_keys(problem: AttentionProblem, strategy: AttentionStrategy) -> bool:
    """True if keys are padded, and no causal mask hides the added ones anyway."""
    return not problem.causal and problem.keys % strategy.token_multiple > 0


def _local(problem: AttentionProblem, strategy: AttentionStrategy) -> AttentionProblem:
    """One device's part of a problem, padding included; of sharded keys one rank's."""
    fit = _fit(problem, strategy)
    parts = strategy.parts(HEADS, ULYSSES)
    return replace(
        problem,
        batch=problem.batch // strategy.parts("batch"),
        queries=strategy.filled(problem.queries) // strategy.ring_ranks,
        keys=strategy.filled(problem.keys) // strategy.ring_ranks,
        heads=fit.heads // parts,
        kv_heads=fit.padded_kv_heads // parts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A problem, and the strategy and kernel that compute it.

    Attributes:
      problem: the whole problem, of all devices.
      heads: padding of heads.
      converts: True if tokens are in natural order, which a zigzag strategy converts.
    """

    problem: AttentionProblem
    mesh: Mesh | None
    strategy: AttentionStrategy
    kernel: Kernel
    heads: HeadFit
    converts: bool

    @property
    def mask(self) -> Mask:
        """Conditions on positions of all tokens, without segments and key lengths."""
        keys = self.problem.keys if _pads_keys(self.problem, self.strategy) else None
        return replace(self.problem.mask(), keys=keys)

    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        query_ids: Array | None,
        key_ids: Array | None,
        bias: Array | None,
        key_lengths: Array | None,
    ) -> Array:
        strategy = self.strategy
        if not strategy.roles or self.mesh is None:
            return self._local(q, k, v, query_ids, key_ids, bias, key_lengths)
        heads = self.problem.heads
        q = self.heads.queries(q)
        k, v = self.heads.keys(k), self.heads.keys(v)
        queries = strategy.filled(self.problem.queries)
        keys = strategy.filled(self.problem.keys)
        q, query_ids = self._ordered(q, queries), self._ordered(query_ids, queries)
        k, v, key_ids = (self._ordered(x, keys) for x in (k, v, key_ids))
        if bias is not None:
            all_heads = self.heads.heads if bias.shape[1] > 1 else 1
            bias = padded(bias, {1: all_heads, 2: queries, 3: keys})

        spec, ids = strategy.spec(), strategy.segment_specs()
        given = {"q": q, "k": k, "v": v}
        specs: dict[str, PartitionSpec] = dict.fromkeys(given, spec)
        if query_ids is not None and key_ids is not None:
            given |= {"query_ids": query_ids, "key_ids": key_ids}
            specs |= {"query_ids": ids[0], "key_ids": ids[1]}
        if bias is not None:
            given["bias"] = bias
            specs["bias"] = strategy.bias_spec(bias.shape)
        if key_lengths is not None:
            given["key_lengths"], specs["key_lengths"] = key_lengths, ids[1]
        out = jax.shard_map(
            lambda given: self._inside(**given),
            mesh=self.mesh,
            in_specs=(specs,),
            out_specs=spec,
            check_vma=False,
        )(given)
        if strategy.zigzag and self.converts:
            out = from_zigzag(out, strategy.ring_ranks)
        return out[:, : self.problem.queries, :heads]

    def _ordered(self, x: Any, tokens: int) -> Any:
        if x is None:
            return None
        strategy = self.strategy
        if tokens > x.shape[1] and strategy.zigzag and not self.converts:
            raise CfpError(
                f"The {x.shape[1]} tokens in zigzag order are no multiple of "
                f"{strategy.token_multiple}. Pad sequences before they are converted."
            )
        x = padded(x, {1: tokens})
        converts = strategy.zigzag and self.converts
        return to_zigzag(x, strategy.ring_ranks) if converts else x

    def _inside(self, q: Array, k: Array, v: Array, **rest: Array) -> Array:
        """Computes one device's part of the output, inside `jax.shard_map`."""
        strategy = self.strategy
        compute = self._local if strategy.spread is None else self._spread
        if not (axes := strategy.axes(ULYSSES)):
            return compute(q, k, v, **rest)
        q, k, v = (_exchanged(x, axes[0], to_heads=True) for x in (q, k, v))
        return _exchanged(compute(q, k, v, **rest), axes[0], to_heads=False)

    def _local(
        self, q, k, v, query_ids=None, key_ids=None, bias=None, key_lengths=None
    ) -> Array:
        mask = replace(
            self.mask,
            query_segments=query_ids,
            key_segments=key_ids,
            key_lengths=key_lengths,
        )
        return self.kernel.module.whole(q, k, v, self.problem.scores, mask, bias)

    def _spread(self, q, k, v, query_ids=None, key_ids=None) -> Array:
        ring = Ring.of(self.strategy, self.kernel, self.problem.scores, self.mask)
        return spread_attention(q, k, v, query_ids, key_ids, ring)


def _exchanged(x: Array, axis: str, *, to_heads: bool) -> Array:
    """Exchanges by all-to-all: from sharded tokens to sharded heads, or back."""
    split, joined = (2, 1) if to_heads else (1, 2)
    return jax.lax.all_to_all(x, axis, split_axis=split, concat_axis=joined, tiled=True)


# -------------------------------------------------------------- all ways to compute it


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOption:
    """A strategy with an implementation.

    Attributes:
      strategy: (axis, role) pairs; axes without a role are missing.
      implementation: name of the kernel on each device.
      reason: why the option is impossible, or None.
    """

    strategy: tuple[tuple[str, str], ...]
    implementation: str
    reason: str | None

    @property
    def possible(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        strategy = AttentionStrategy(roles=self.strategy, sizes=())
        return f"{strategy} / {self.implementation}: {self.reason or 'possible'}"


def attention_options(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Window = None,
    segment_ids: Any = None,
    key_lengths: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    scale: float | None = None,
    mesh: Mesh | None = None,
    platform: str | None = None,
) -> tuple[AttentionOption, ...]:
    """Lists all strategies with all implementations, without running any.

    Args:
      q, k, v, causal, window, segment_ids, key_lengths, bias, softcap, scale: as for
        `cfp.attention`; only shapes and dtypes of arrays matter.
      mesh: each of its axes gets each role, or none, in all combinations; without it,
        only the strategy without roles is listed.
      platform: the devices' platform; by default the mesh's, or JAX's.

    Returns:
      All options; impossible ones have a reason.

    Raises:
      CfpError: arguments do not fit together.
    """
    problem = problem_of(
        q,
        k,
        v,
        causal=causal,
        window=window,
        segment_ids=segment_ids,
        key_lengths=key_lengths,
        bias=bias,
        softcap=softcap,
        scale=scale,
    )
    sizes = dict(mesh.shape) if mesh is not None else {}
    platform = platform or platform_of(mesh)
    found = []
    for roles in product((None, *ROLES), repeat=len(sizes)):
        given = {a: role for a, role in zip(sizes, roles, strict=True) if role}
        strategy = AttentionStrategy.of(given, sizes)
        option = partial(AttentionOption, strategy=strategy.roles)
        for name, kernel in KERNELS.items():
            reason = refusal(problem, strategy, kernel, platform)
            found.append(option(implementation=name, reason=reason))
    return tuple(found)
