"""cuDNN's flash attention, through `jax.nn.dot_product_attention`.

For a ring, the two kernels that JAX's function is made of are called one by one: the
forward one gives its log-sum-exp in float32, and the backward one takes that of the
whole row. They are found in the program that JAX traces for the public function, by
the names of their operations, so no other module of JAX is used. By the same names
:func:`read_call` reads the attentions that a step computes by that function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from cfp.attention.problem import AttentionProblem, Mask, Scores, finite_bias
from cfp.errors import AttentionError
from cfp.program.jaxprs import equations

FORWARD = "dot_product_attention_fwd_wrapper"
BACKWARD = "dot_product_attention_bwd_wrapper"
# Of FORWARD's operands the first three are q, k, v; of BACKWARD's these, too.
_LSE, _OUT, _DOUT = 10, 11, 12

# The kernels inside of these two, and the form of their operands and results.
_KERNELS = MappingProxyType(
    {"dot_product_attention_fwd": False, "dot_product_attention_bwd": True}
)
_LAYOUTS = ("BTNH", "BNTH")
# Parameters that change what is computed, in words, with their neutral values; the
# seed is read with dropout alone.
_NEUTRAL: Mapping[str, tuple[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "variadic_args": ("a bias or a mask as one", ((False, False),)),
        "dropout_rate": ("dropout", (0.0,)),
        "sliding_window_length": ("a sliding window", (None, 0)),
        "score_mod_name": ("a function of the scores", (None,)),
        "score_mod_jaxpr": ("a function of the scores", (None,)),
    }
)
_READ = frozenset({"scale", "mask_type", "layout", "is_training", "seed", *_NEUTRAL})
_CAUSAL = MappingProxyType({"NO_MASK": False, "CAUSAL": True})

LEAST_CAPABILITY = 8.0
HEAD_DIM_STEP = 8
# By compute capability; jax.nn.dot_product_attention says the same.
MAX_HEAD_DIM_HOPPER, MAX_HEAD_DIM = 256, 128


def refusal(problem: AttentionProblem, platform: str) -> str | None:
    """Returns the reason why cuDNN does not compute this, or None."""
    if platform not in ("cuda", "gpu"):
        return f"it runs on NVIDIA GPUs, and devices are of platform {platform}"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"it computes in float16 and bfloat16, not in {problem.dtype}"
    capability = _least_capability()
    if capability is None:
        return "it runs on NVIDIA GPUs, and a device is none"
    if capability < LEAST_CAPABILITY:
        return f"it takes compute capability 8.0, and a device has {capability}"
    widest = MAX_HEAD_DIM_HOPPER if capability >= 9.0 else MAX_HEAD_DIM
    if problem.head_dim % HEAD_DIM_STEP or problem.head_dim > widest:
        return (
            f"its head dim is a multiple of {HEAD_DIM_STEP} up to {widest} on this "
            f"device, not {problem.head_dim}"
        )
    if problem.softcap is not None:
        return "it has no soft cap"
    if problem.segments and not problem.hides_keys:
        return "JAX's public function has no packed segments for it"
    if problem.right is not None or (problem.left is not None and not problem.causal):
        return "its window is to the left of a causal mask only"
    if problem.rounds_bias:
        return (
            f"it adds a bias in {problem.dtype}, which would round this one; it would "
            f"with the bias cast to {problem.dtype}"
        )
    if problem.open_bias:
        return "a bias that the step computes may hide all keys of a query"
    if problem.rounds_output:
        return (
            f"it makes its output in {problem.dtype}, which would round this one; it "
            f"would with the output cast to {problem.dtype}"
        )
    is_odd = problem.queries % 2 or problem.keys % 2
    if is_odd and (problem.bias or problem.hides_keys):
        return f"with a {problem.bias_text} its lengths are even"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One of the two kernels, as a program of the user's calls it.

    Attributes:
      layout: of queries, keys, values, output and their gradients: "BTNH" or "BNTH",
        for batch, tokens, heads and head dim. The log-sum-exp is "BNT".
      reads: which operands it reads: q, k, v; then the log-sum-exp, the output and its
        gradient.
      scale: of the products of queries and keys.
      causal: whether no key behind the query is seen.
      unknown: what it computes besides, in words; "" for nothing.
    """

    is_backward: bool
    layout: str
    reads: tuple[int, ...]
    scale: float
    causal: bool
    unknown: str = ""


def read_call(traced: Any) -> Call | None:
    """The kernel that a closed jaxpr consists of; None if it is something else."""
    program = traced.jaxpr
    named = [one for one in program.eqns if one.primitive.name in _KERNELS]
    if len(named) != 1:
        return None
    [equation] = named
    params = equation.params
    is_backward = _KERNELS[equation.primitive.name]
    reads = (0, 1, 2, *((_LSE, _OUT, _DOUT) if is_backward else ()))
    unknown = [f"the parameter {name}" for name in sorted(params.keys() - _READ)]
    unknown += [
        words
        for name, (words, neutral) in _NEUTRAL.items()
        if params.get(name, neutral[0]) not in neutral
    ]
    mask = getattr(params["mask_type"], "name", str(params["mask_type"]))
    if mask not in _CAUSAL:
        unknown.append("lengths of sequences" if "PADDING" in mask else f"mask {mask}")
    given = [v for place, v in enumerate(equation.invars) if place not in reads]
    if not unknown and any(v.aval.size for v in given):
        unknown.append("further operands")
    alone = len(program.eqns) == 1
    whole = [*program.invars] == [*equation.invars]
    if not (alone and whole and [*program.outvars] == [*equation.outvars]):
        unknown = unknown or ["further operations"]
    return Call(
        is_backward=is_backward,
        layout=_LAYOUTS[params["layout"]],
        reads=reads,
        scale=float(params["scale"]),
        causal=_CAUSAL.get(mask, False),
        unknown=" and ".join(dict.fromkeys(unknown)),
    )


def _least_capability() -> float | None:
    """The least compute capability of this process's devices.

    9.0 where they are no GPUs and others are planned for; None of GPUs that are not
    NVIDIA's, whose capability is a name.
    """
    found = [getattr(d, "compute_capability", "9.0") for d in jax.local_devices()]
    try:
        return min(map(float, found))
    except ValueError:
        return None


def whole(
    q: Array, k: Array, v: Array, scores: Scores, mask: Mask, bias: Array | None
) -> Array:
    """Attention by the public function, differentiable."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=None if bias is None else finite_bias(bias, q.dtype),
        scale=scores.scale,
        is_causal=mask.causal,
        key_value_seq_lengths=mask.lengths(q.shape[0]),
        local_window_size=None if mask.left is None else (mask.left, 0),
        implementation="cudnn",
    )


def attend(
    q: Array, k: Array, v: Array, scores: Scores, mask: Mask
) -> tuple[Array, Array]:
    """Like `plain.attend`, but the output is in q's dtype; causal, or without mask."""
    call = _find(FORWARD, q, k, v, scores, mask)
    out, lse = _bind(call, {0: q, 1: k, 2: v})[:2]
    return out, lse.swapaxes(1, 2)


def gradients(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    scores: Scores,
    mask: Mask,
) -> tuple[Array, Array, Array]:
    """Like `plain.gradients`; the mask is causal, or there is none."""
    call = _find(BACKWARD, q, k, v, scores, mask)
    given = {0: q, 1: k, 2: v, _LSE: lse.swapaxes(1, 2)}
    given |= {_OUT: out.astype(q.dtype), _DOUT: dout.astype(q.dtype)}
    dq, dk, dv = _bind(call, given)[:3]
    return dq, dk, dv


def _find(name: str, q: Array, k: Array, v: Array, scores: Scores, mask: Mask) -> Any:
    """The operation of that name in what JAX traces for the public function."""
    assert mask.query_segments is None and mask.query_positions is None

    def both(q: Array, k: Array, v: Array) -> Any:
        out, pull = jax.vjp(lambda q, k, v: whole(q, k, v, scores, mask, None), q, k, v)
        return pull(out)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    for equation in equations(jax.make_jaxpr(both)(*shapes).jaxpr):
        if equation.primitive.name == name:
            return equation
    raise AttentionError(
        "This JAX traces cuDNN's attention in a form that a ring cannot use.",
        expected=f"an operation {name}, as in jax 0.10.2 to 0.12",
        got=f"jax {jax.__version__}",
        attempt='implementation="chunked"',
    )


def _bind(equation: Any, given: dict[int, Array]) -> Any:
    """Runs an operation; operands that are not given are those that are not used."""
    operands = []
    for place, variable in enumerate(equation.invars):
        if place in given:
            operands.append(given[place])
        else:
            assert variable.aval.size == 0, "an operand that is not used is empty"
            operands.append(jnp.zeros(variable.aval.shape, variable.aval.dtype))
    return equation.primitive.bind(*operands, **equation.params)
