"""The operators, and the table of (operator, implementation) to function.

Attention, of queries, keys and values [batch, tokens, heads, head_dim]:

- BERT: every query sees the keys of its sequence; what follows its length is padding.
- GPT: a query sees keys up to its own place.
- T5: every query sees all keys; a bias is added to the scores, which are not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
from jax import Array

from cfp.attention.kernels import KERNELS
from cfp.attention.problem import problem_of
from cfp.errors import CfpError
from cfp.operators import formulas as f
from cfp.operators.formulas import causal_mask, length_mask
from cfp.operators.operator import Argument, Implementation, Operator, Reason

_LEAST_CAPABILITY = 8.0


@cache
def gpu_reason() -> Reason:
    """Returns the reason why there is no NVIDIA GPU that fused kernels run on."""
    device = jax.devices()[0]
    if device.platform != "gpu" or not device.device_kind.startswith(
        ("NVIDIA", "Tesla", "Quadro", "GeForce")
    ):
        return f"needs an NVIDIA GPU, and JAX runs on {device.device_kind}"
    if (capability := float(device.compute_capability)) < _LEAST_CAPABILITY:
        return f"needs compute capability {_LEAST_CAPABILITY}, this is {capability}"
    return None


def _masked(softmax: Callable[..., Array]) -> Callable[..., Array]:
    return lambda scores, lengths: softmax(
        scores, length_mask(lengths, scores.shape[-1])
    )


def _causal(softmax: Callable[..., Array]) -> Callable[..., Array]:
    return lambda scores: softmax(scores, causal_mask(*scores.shape[-2:]))


def _odd(x: Array, *, base: float) -> Reason:
    return f"the head's width {x.shape[-1]} is odd" if x.shape[-1] % 2 else None


def _bad_rate(*args: Array, rate: float, eps: float) -> Reason:
    return None if 0.0 <= rate < 1.0 else f"rate={rate} is not in [0, 1)"


def _bad_choices(x: Array, scores: Array, *rest: Array, choices: int) -> Reason:
    if 1 <= choices <= scores.shape[1]:
        return None
    return f"choices={choices} of {scores.shape[1]} experts"


def _too_many(x: Array, kernel: Array, labels: Array, *, chunks: int) -> Reason:
    if 1 <= chunks <= kernel.shape[0]:
        return None
    return f"a vocabulary of {kernel.shape[0]} has no {chunks} parts"


def _uneven(x: Array, kernel: Array, labels: Array, *, chunks: int) -> Reason:
    if chunks >= 1 and x.shape[0] % chunks == 0:
        return None
    return f"{x.shape[0]} tokens have no {chunks} equal parts"


# ------------------------------------------------------------------------- attention

# From (query, key, the operator's other arguments) to keyword arguments.
Form = Callable[..., Mapping[str, Any]]


def _by(attend: Callable[..., Array], form: Form) -> Callable[..., Array]:
    return lambda query, key, value, *rest: attend(
        query, key, value, **form(query, key, *rest)
    )


def _attention(name: str, form: Form, fused: Form) -> dict[Any, Implementation]:
    """The implementations of an attention.

    Args:
        form: makes `mask`, `bias` and `scale`.
        fused: makes the keyword arguments of `jax.nn.dot_product_attention`.
    """

    def refuses(query: Array, key: Array, value: Array, *rest: Array) -> Reason:
        given = fused(query, key, *rest)
        causal, (bias, scale) = "is_causal" in given, map(given.get, ("bias", "scale"))
        try:
            problem = problem_of(
                query, key, value, causal=causal, bias=bias, scale=scale
            )
        except CfpError as error:
            return str(error)
        return KERNELS["cudnn"].refusal(problem, jax.default_backend())

    nn = jax.nn.dot_product_attention
    cudnn, xla = (_by(partial(nn, implementation=i), fused) for i in ("cudnn", "xla"))
    plain, flax = _by(f.all_scores, form), _by(f.attention_flax, form)
    return {
        (name, "cudnn"): Implementation("cuDNN by jax.nn", cudnn, refuses, gpu_reason),
        (name, "jax_nn"): Implementation("jax.nn", xla),
        (name, "xla"): Implementation("XLA", plain),
        (name, "flax"): Implementation("flax", flax),
    }


def _of_t5(query: Array, key: Array, bias: Array) -> dict[str, Any]:
    return {"bias": bias, "scale": 1.0}


# ----------------------------------------------------------------------------- table

_SCAN = "XLA, jax.lax.scan"
_AGAIN = "jax.nn, jax.checkpoint"
_nn_dropout = partial(f.dropout_add_layer_norm, norm=f.layer_norm_jax_nn)

# By operator and name, the preferred ones first.
IMPLEMENTATIONS: Mapping[tuple[str, str], Implementation] = {
    **_attention(
        "gpt_attention",
        lambda query, key: {"mask": causal_mask(query.shape[1], key.shape[1])},
        lambda query, key: {"is_causal": True},
    ),
    **_attention(
        "bert_attention",
        lambda query, key, lengths: {"mask": length_mask(lengths, key.shape[1])},
        lambda query, key, lengths: {"key_value_seq_lengths": lengths},
    ),
    **_attention("t5_attention", _of_t5, _of_t5),
    ("linear_cross_entropy", "xla"): Implementation("XLA", f.linear_cross_entropy),
    ("linear_cross_entropy", "chunked_vocabulary"): Implementation(
        _SCAN, f.chunked_vocabulary, _too_many
    ),
    ("linear_cross_entropy", "chunked_tokens"): Implementation(
        _SCAN, f.chunked_tokens, _uneven
    ),
    ("layer_norm", "xla"): Implementation("XLA", f.layer_norm),
    ("layer_norm", "jax_nn"): Implementation("jax.nn", f.layer_norm_jax_nn),
    ("rms_norm", "xla"): Implementation("XLA", f.rms_norm),
    ("rms_norm", "flax"): Implementation("flax", f.rms_norm_flax),
    ("dropout_add_layer_norm", "xla"): Implementation(
        "XLA", f.dropout_add_layer_norm, _bad_rate
    ),
    ("dropout_add_layer_norm", "jax_nn"): Implementation(
        "jax.nn", _nn_dropout, _bad_rate
    ),
    ("bias_gelu", "jax_nn"): Implementation("jax.nn", f.bias_gelu_jax_nn),
    ("bias_gelu", "rematerialized"): Implementation(
        _AGAIN, jax.checkpoint(f.bias_gelu_jax_nn)
    ),
    ("swiglu", "jax_nn"): Implementation("jax.nn", f.swiglu),
    ("swiglu", "rematerialized"): Implementation(_AGAIN, f.swiglu_rematerialized),
    ("qkv_projection", "separate"): Implementation("XLA", f.qkv_separate),
    ("qkv_projection", "fused"): Implementation("XLA", f.qkv_fused),
    ("qkv_projection", "batched"): Implementation("jax.numpy", f.qkv_batched),
    ("cross_entropy", "xla"): Implementation("XLA", f.cross_entropy),
    ("cross_entropy", "one_hot"): Implementation("jax.nn", f.cross_entropy_one_hot),
    ("softmax", "jax_nn"): Implementation("jax.nn", f.softmax_jax_nn),
    ("softmax", "xla"): Implementation("XLA", f.softmax),
    ("masked_softmax", "jax_nn"): Implementation("jax.nn", _masked(f.softmax_jax_nn)),
    ("masked_softmax", "xla"): Implementation("XLA", _masked(f.softmax)),
    ("causal_softmax", "jax_nn"): Implementation("jax.nn", _causal(f.softmax_jax_nn)),
    ("causal_softmax", "xla"): Implementation("XLA", _causal(f.softmax)),
    ("rotary_embedding", "xla"): Implementation("XLA", f.rotary, _odd),
    ("rotary_embedding", "complex"): Implementation("jax.lax", f.rotary_complex, _odd),
    ("embedding", "xla"): Implementation("jax.numpy", f.take),
    ("embedding", "float32"): Implementation("jax.numpy", f.take_float32),
    ("grouped_matmul", "ragged_dot"): Implementation("jax.lax", f.ragged_dot),
    ("grouped_matmul", "one_by_one"): Implementation("XLA", f.one_by_one),
    ("moe_dispatch", "ragged_dot"): Implementation(
        "jax.lax", f.sorted_experts, _bad_choices
    ),
    ("moe_dispatch", "every_expert"): Implementation(
        "XLA", f.every_expert, _bad_choices
    ),
}

_X, _X_FLAT = Argument("x", "* h"), Argument("x", "t h")
_SCALE = Argument("scale", "h", around=1.0, spread=0.1)
_BIAS = Argument("bias", "h", spread=0.1)
_SCORES = Argument("scores", "b n q s", spread=2.0)
_LABELS = Argument("labels", "t", kind="below", below="v")
_LENGTHS = Argument("lengths", "b", kind="lengths", below="s")
_QKV = tuple(Argument(name, "b s n d") for name in ("query", "key", "value"))


def _operator(
    name: str,
    summary: str,
    oracle: Callable[..., Array],
    *arguments: Argument,
    flops: Callable[[Mapping[str, int]], float] = lambda dims: 0.0,
    **options: Any,
) -> Operator:
    """An operator with its implementations of the table."""
    return Operator(
        name=name,
        summary=summary,
        arguments=arguments,
        oracle=oracle,
        implementations={i: x for (o, i), x in IMPLEMENTATIONS.items() if o == name},
        flops=flops,
        options=options,
    )


def _attention_flops(dims: Mapping[str, int]) -> float:
    return 4.0 * dims["b"] * dims["n"] * dims["s"] ** 2 * dims["d"]


# In the order in which they are measured: those that matter most come first.
_EVERY = (
    _operator(
        "gpt_attention",
        "causal attention",
        IMPLEMENTATIONS["gpt_attention", "xla"].call,
        *_QKV,
        flops=lambda d: 0.5 * _attention_flops(d),
    ),
    _operator(
        "bert_attention",
        "attention to the first keys of each sequence",
        IMPLEMENTATIONS["bert_attention", "xla"].call,
        *(*_QKV, _LENGTHS),
        flops=_attention_flops,
    ),
    _operator(
        "t5_attention",
        "attention with a bias of the scores, which are not scaled",
        IMPLEMENTATIONS["t5_attention", "xla"].call,
        Argument("query", "b s n d", spread="fan_last"),
        *(*_QKV[1:], Argument("bias", "1 n s s")),
        flops=_attention_flops,
    ),
    _operator(
        "linear_cross_entropy",
        "mean cross-entropy of x @ kernel.T, float32",
        f.linear_cross_entropy,
        *(_X_FLAT, Argument("kernel", "v h", spread="fan_last"), _LABELS),
        flops=lambda d: 2.0 * d["t"] * d["h"] * d["v"],
        chunks=8,
    ),
    _operator(
        "layer_norm",
        "(x - mean) / sqrt(variance + eps) * scale + bias, over the last dim",
        f.layer_norm,
        *(_X, _SCALE, _BIAS),
        eps=1e-5,
    ),
    _operator(
        "rms_norm",
        "x / sqrt(mean of squares + eps) * scale, over the last dim",
        f.rms_norm,
        *(_X, _SCALE),
        eps=1e-6,
    ),
    _operator(
        "dropout_add_layer_norm",
        "layer norm of residual + dropout(x), as after each half of a layer",
        f.dropout_add_layer_norm,
        *(_X, Argument("residual", "* h"), _SCALE, _BIAS),
        Argument("key", "2", kind="key"),
        rate=0.1,
        eps=1e-5,
    ),
    _operator(
        "bias_gelu",
        "GELU (tanh) of x + bias, as between the two halves of an MLP",
        f.bias_gelu,
        *(Argument("x", "* f"), Argument("bias", "f")),
    ),
    _operator(
        "swiglu",
        "silu(x @ gate) * (x @ up), the first half of a gated MLP",
        f.swiglu,
        *(_X, Argument("gate", "h f", spread="fan_in")),
        Argument("up", "h f", spread="fan_in"),
        flops=lambda d: 4.0 * d["*"] * d["h"] * d["f"],
    ),
    _operator(
        "qkv_projection",
        "query, key and value of x, stacked",
        f.qkv_separate,
        *(_X, Argument("kernel", "3 h h", spread="fan_in")),
        Argument("bias", "3 h", spread=0.1),
        flops=lambda d: 6.0 * d["*"] * d["h"] ** 2,
    ),
    _operator(
        "cross_entropy",
        "minus the log probability of each label, float32",
        f.cross_entropy,
        *(Argument("logits", "t v", spread=2.0), _LABELS),
    ),
    _operator("softmax", "softmax over the last dim", f.softmax, _SCORES),
    _operator(
        "masked_softmax",
        "softmax over the first keys of each sequence, the others are zero",
        _masked(f.softmax),
        *(_SCORES, _LENGTHS),
    ),
    _operator(
        "causal_softmax",
        "softmax over the keys up to each query's own place",
        _causal(f.softmax),
        _SCORES,
    ),
    _operator(
        "rotary_embedding",
        "turns pairs of a head's features by angles that grow with the place",
        f.rotary,
        Argument("x", "b s n d"),
        base=10000.0,
    ),
    _operator(
        "embedding",
        "rows of a table, by token",
        f.take,
        *(Argument("table", "v h"), Argument("tokens", "b s", kind="below", below="v")),
    ),
    _operator(
        "grouped_matmul",
        "rows of x in groups, each group with a kernel of its own",
        f.one_by_one,
        *(_X_FLAT, Argument("kernels", "e h w", spread="fan_in")),
        Argument("groups", "e", kind="groups", below="t"),
        flops=lambda d: 2.0 * d["t"] * d["h"] * d["w"],
    ),
    _operator(
        "moe_dispatch",
        "each token through the MLPs of its best experts, weighted",
        f.every_expert,
        *(_X_FLAT, Argument("scores", "t e")),
        Argument("up", "e h w", spread="fan_in"),
        Argument("down", "e w h", spread="fan_in"),
        flops=lambda d: 8.0 * d["t"] * d["h"] * d["w"],
        choices=2,
    ),
)
OPERATORS: Mapping[str, Operator] = {one.name: one for one in _EVERY}
