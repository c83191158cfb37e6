"""Kernels of one device, what rules them out, and what cfp.attention does with both."""

import inspect
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cfp
from cfp.kernels import call, chunked, cudnn, kinds, plain
from cfp.kernels.call import fit_heads
from cfp.kernels.chunked import merge, nothing_yet
from cfp.kernels.problem import (
    NO_MASK,
    Mask,
    Scores,
    may_meet,
    problem_of,
    visible,
)
from cfp.kernels.ring import from_zigzag, local_positions, to_zigzag, zigzag_order
from cfp_test.kernels.called import cudnn_on_cpus
from cfp_test.kernels.matrix import inputs, mesh_of, packed
from cfp_test.support.covering import at_night

SCORES = Scores(scale=0.3)
CAUSAL = Mask(causal=True, left=None, right=None, keys=None)


def distance(mine, right):
    right = np.asarray(right, np.float32)
    off = np.linalg.norm(np.asarray(mine, np.float32) - right)
    return float(off / np.linalg.norm(right))


def both_ways(attend, q, k, v, dout):
    """The output and the gradients."""

    @jax.jit  # Op by op it compiles for longer.
    def run(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout.astype(out.dtype))

    return run(q, k, v, dout)


STATIC = ("causal", "mesh", "strategy")


def test_a_mask_shows_what_all_its_parts_allow():
    ids = packed(12, batch=2)
    mask = Mask(
        causal=True, left=3, right=None, keys=9, query_segments=ids, key_segments=ids
    )
    shown = visible(mask, 12, 12)
    assert shown is not None and shown.shape == (2, 1, 12, 12)
    for b, q, k in np.ndindex(2, 12, 12):
        right = k <= q and q - k <= 3 and k < 9 and ids[b, q] == ids[b, k]
        assert shown[b, 0, q, k] == right
    assert visible(NO_MASK, 12, 12) is None


def test_blocks_that_meet_are_never_left_out():
    mask = Mask(causal=False, left=3, right=2, keys=14)
    shown = np.asarray(visible(mask, 16, 16))[0, 0]
    for q, k in np.ndindex(4, 4):
        rows, columns = np.arange(4 * q, 4 * q + 4), np.arange(4 * k, 4 * k + 4)
        met = bool(may_meet(mask, jnp.asarray(rows), jnp.asarray(columns)))
        assert met == shown[np.ix_(rows, columns)].any()


def test_parts_of_the_keys_join_to_all_of_them():
    q, k, v, _ = inputs((4, 2), 12, "float32")
    whole = plain.attend(q, k, v, SCORES, NO_MASK)
    parts = [plain.attend(q, k[:, s], v[:, s], SCORES, NO_MASK) for s in _cuts(12)]
    joined = nothing_yet(q)
    for part in parts:
        joined = merge(joined, part)
    assert distance(joined[0], whole[0]) < 1e-6
    assert distance(joined[1], whole[1]) < 1e-6
    empty = merge(nothing_yet(q), nothing_yet(q))
    assert not np.isnan(empty[0]).any() and np.isneginf(empty[1]).all()


def _cuts(tokens):
    return [slice(0, 5), slice(5, 6), slice(6, tokens)]


def test_a_query_that_sees_no_key_gets_zeros(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK", 4)
    q, k, v, dout = inputs((2, 2), 8, "float32")
    ids = jnp.zeros((2, 8), jnp.int32)
    mask = Mask(
        causal=False,
        left=None,
        right=None,
        keys=None,
        query_segments=ids.at[:, 3].set(7),
        key_segments=ids,
    )
    out, lse = chunked.attend(q, k, v, SCORES, mask)
    grads = chunked.gradients((q, out, lse, dout), k, v, SCORES, mask)
    assert not out[:, 3].any() and np.isneginf(lse[:, 3]).all()
    assert not any(np.isnan(g).any() for g in grads) and not grads[0][:, 3].any()
    _, *right = both_ways(
        lambda q, k, v: plain.attend(q, k, v, SCORES, mask)[0], q, k, v, dout
    )
    for mine, other in zip(grads, right, strict=True):
        assert distance(mine, other) < 1e-5


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_a_soft_cap_and_its_gradients(implementation):
    q, k, v, dout = inputs((4, 2), 12, "float32")
    q = 4 * q  # So that scores come near the cap.

    def by_hand(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, 2, 2)) / math.sqrt(8)
        scores = 5 * jnp.tanh(scores / 5)
        seen = jnp.tril(jnp.ones((12, 12), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(v, 2, 2))

    def ours(q, k, v):
        return cfp.attention(
            q, k, v, causal=True, softcap=5.0, implementation=implementation
        )

    for mine, right in zip(
        both_ways(ours, q, k, v, dout), both_ways(by_hand, q, k, v, dout), strict=True
    ):
        assert distance(mine, right) < 1e-5


def test_a_bias_goes_with_its_heads():
    """Through Ulysses, whose heads do not divide here; with its own gradient."""
    q, k, v, dout = inputs((6, 6), 8, "float32")
    bias = jax.random.normal(jax.random.key(1), (1, 6, 8, 8))

    def ours(bias, **how):
        return cfp.attention(q, k, v, bias=bias, **how)

    right = both_ways(lambda b, *_: ours(b), bias, k, v, dout)[:2]
    mesh = mesh_of({"x": 4})
    spread = both_ways(
        lambda b, *_: ours(b, mesh=mesh, strategy="ulysses"), bias, k, v, dout
    )[:2]
    alone = jax.nn.dot_product_attention(q, k, v, bias)
    assert distance(right[0], alone) < 1e-6
    for mine, other in zip(spread, right, strict=True):
        assert distance(mine, other) < 1e-5


def test_queries_and_keys_of_other_lengths():
    q, _, _, dout = inputs((4, 2), 8, "float32")
    _, k, v, _ = inputs((4, 2), 12, "float32")
    right = both_ways(lambda q, k, v: cfp.attention(q, k, v), q, k, v, dout)
    mesh = mesh_of({"x": 4})
    mine = both_ways(
        lambda q, k, v: cfp.attention(q, k, v, mesh=mesh, strategy="ring"),
        q,
        k,
        v,
        dout,
    )
    for one, other in zip(mine, right, strict=True):
        assert distance(one, other) < 1e-5


def test_every_rank_of_zigzag_has_two_chunks():
    order = zigzag_order(16, 2)
    assert order.tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]
    x = jnp.arange(32).reshape(2, 16)
    assert (from_zigzag(to_zigzag(x, 2), 2) == x).all()
    for rank in range(2):
        mine = local_positions(jnp.asarray(rank), 2, 8, zigzag=True)
        assert mine.tolist() == order[8 * rank : 8 * rank + 8].tolist()
    with pytest.raises(cfp.CfpError, match="The length 16 is no multiple"):
        zigzag_order(16, 3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "parts", "fits"),
    [
        (8, 2, 4, (8, 4)),  # Key heads are copied, one for each part.
        *at_night([(8, 8, 4, (8, 8)), (8, 1, 8, (8, 8)), (8, 1, 4, (8, 4))]),
        (6, 6, 4, (8, 8)),  # Two heads of zeros.
        (9, 3, 4, (12, 4)),  # One more key head, of zeros, with its three queries.
        (32, 8, 3, (36, 9)),
    ],
)
def test_heads_are_made_to_divide(heads, kv_heads, parts, fits):
    fit = fit_heads(heads, kv_heads, parts)
    assert (fit.heads, fit.padded_kv_heads) == fits
    q, k, _, _ = inputs((heads, kv_heads), 2, "float32")
    padded_q, padded_k = fit.queries(q), fit.keys(k)
    assert padded_q.shape[2:] == (fits[0], 8) and padded_k.shape[2:] == (fits[1], 8)
    for head in range(heads):  # Each query head still has its key head.
        theirs = padded_k[:, :, head // (fits[0] // fits[1])]
        assert (theirs == k[:, :, head // (heads // kv_heads)]).all()


# ------------------------------------------------------------- what cannot be done


def shapes(heads=(8, 8), tokens=64, dtype=jnp.bfloat16, head_dim=64):
    return [
        jax.ShapeDtypeStruct((4, tokens, n, head_dim), dtype)
        for n in (heads[0], heads[1], heads[1])
    ]


def options(*args, **how):
    mesh = mesh_of({"x": 4})
    found = cfp.attention_options(*args, mesh=mesh, platform="cuda", **how)
    return {(dict(o.strategy).get("x"), o.implementation): o.reason for o in found}


def test_options_say_what_is_possible_and_why_not():
    ids = jax.ShapeDtypeStruct((4, 64), jnp.int32)
    plain_ones = options(*shapes(), causal=True)
    assert len(plain_ones) == 7 * 3
    assert plain_ones["ring", "cudnn"] is plain_ones["zigzag", "xla"] is None
    packed_ones = options(*shapes(), causal=True, segment_ids=ids)
    assert "packed segments" in packed_ones["batch", "cudnn"]
    assert packed_ones["ring", "chunked"] is None
    window = options(*shapes(), causal=True, window=8)
    assert window["ulysses", "cudnn"] is None
    assert "blocks of keys with a window" in window["ring", "cudnn"]
    odd = options(*shapes(tokens=63))
    assert "blocks of keys with padded keys" in odd["ring", "cudnn"]
    assert odd["ulysses", "cudnn"] is None
    wide = options(*shapes(head_dim=512))
    assert "a multiple of 8 up to 256" in wide["batch", "cudnn"]
    assert "not in float32" in options(*shapes(dtype=jnp.float32))["batch", "cudnn"]
    capped = options(*shapes(), softcap=30.0)
    assert capped["batch", "cudnn"] == "it computes no soft cap"


def test_options_take_the_arguments_of_the_attention():
    own = {"mesh", "strategy", "implementation", "zigzag_tokens", "platform"}
    problem, attention, listed = (
        {*inspect.signature(one).parameters} - own
        for one in (problem_of, cfp.attention, cfp.attention_options)
    )
    assert problem == attention == listed
    lengths = options(*shapes(), key_lengths=jax.ShapeDtypeStruct((4,), jnp.int32))
    assert lengths["ulysses", "cudnn"] is None
    assert "segments or key lengths" in lengths["ring", "cudnn"]


def test_blocks_of_odd_numbers_of_tokens_are_refused():
    """JAX refuses the gradients of such blocks, which a ring cannot fill up."""
    for tokens, odd in ((4 * 6, "zigzag"), (4 * 5, "ring"), (4 * 5, "all_gather")):
        found = options(*shapes(tokens=tokens), causal=True)
        assert "odd numbers of tokens" in found[odd, "cudnn"]
    found = options(*shapes(tokens=4 * 6), causal=True)
    assert found["ring", "cudnn"] is found["ulysses", "cudnn"] is None


def test_two_axes_have_each_pair_of_roles():
    mesh = mesh_of({"x": 2, "y": 2})
    found = cfp.attention_options(*shapes(), mesh=mesh)
    known = {o.strategy: o for o in found if o.implementation == "xla"}
    assert len(known) == 7 * 7
    assert known[("x", "ring"), ("y", "ulysses")].possible
    assert known[("x", "batch"), ("y", "heads")].possible
    twice = known[("x", "ring"), ("y", "zigzag")].reason
    assert twice == "2 axes are for ring or gathering, and one may be"


IDS = jnp.zeros((2, 8), jnp.int32)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"strategy": "tensor"}, "does not fit the mesh"),
        ({"strategy": {"z": "ring"}}, "does not fit the mesh"),
        ({"implementation": "magic"}, "There is no implementation"),
        ({"strategy": "ring", "implementation": "cudnn"}, "platform cpu"),
        ({"strategy": "ring", "bias": jnp.zeros((1, 1, 8, 8))}, "a column for each"),
        ({"bias": jnp.zeros((8, 8))}, "does not fit the scores"),
        ({"bias": jnp.ones((1, 1, 8, 8), bool)}, "The bias is of bool"),
        ({"key_lengths": jnp.ones(2, int), "segment_ids": IDS}, "Key lengths came"),
        ({"segment_ids": jnp.zeros((1, 3), jnp.int32)}, r"ids=\(of_queries"),
        ({"key_lengths": jnp.ones(1, int)}, r"int32\[1\]. Pass int32\[2\]"),
        ({"key_lengths": jnp.ones((2, 1), int)}, r"Pass int32\[2\]\."),
        ({"key_lengths": jnp.ones(2)}, r"keys: float32\[2\]"),
        ({"strategy": "batch"}, "2 sequences do not divide into 4 parts"),
        ({"strategy": "ring", "zigzag_tokens": True}, "takes no tokens in zigzag"),
    ],
)
def test_what_is_ruled_out_says_why(how, words):
    q, k, v, _ = inputs((2, 2), 8, "float32")
    with pytest.raises(cfp.CfpError, match=words):
        cfp.attention(q, k, v, mesh=mesh_of({"x": 4}), **how)


def test_shapes_that_do_not_fit_are_refused():
    q, k, v, _ = inputs((4, 3), 8, "float32")
    with pytest.raises(cfp.CfpError, match="do not fit together"):
        cfp.attention(q, k, v)


# ------------------------------------------------------------------- cuDNN, in parts


@pytest.fixture
def cudnn_on_cpu(monkeypatch):
    """JAX traces cuDNN's operations here, and the CPU computes them another way."""
    monkeypatch.setattr(call, "platform_of", lambda mesh: "cuda")
    with cudnn_on_cpus(monkeypatch, parts=True):
        yield


@pytest.mark.parametrize(
    "strategy", ["ring", "all_gather", *at_night(["zigzag", "ulysses"])]
)
def test_cudnn_in_parts_is_attention(cudnn_on_cpu, strategy):
    q, k, v, dout = inputs((4, 2), 32, "bfloat16")
    wide = [x.astype(jnp.float32) for x in (q, k, v, dout)]
    mesh = mesh_of({"x": 4 if strategy == "ring" else 2})
    mine = both_ways(
        lambda q, k, v: cfp.attention(
            q,
            k,
            v,
            causal=True,
            mesh=mesh,
            strategy=strategy,
            implementation="cudnn",
        ),
        q,
        k,
        v,
        dout,
    )
    right = both_ways(
        lambda q, k, v: plain.attend(q, k, v, Scores(scale=8**-0.5), CAUSAL)[0], *wide
    )
    for one, other in zip(mine, right, strict=True):
        assert distance(one, other) < 5e-3


@pytest.mark.parametrize("lengths", [None, np.array([5, 8], np.uint8)])
@pytest.mark.parametrize(
    ("queries", "keys", "how"),
    [
        (9, 9, {}),
        (9, 9, {"causal": True}),
        (9, 6, {"causal": True}),
        (8, 5, {"causal": True}),
        (6, 9, {"mesh": {"x": 3}, "strategy": "ulysses"}),
        (8, 8, {"mesh": {"x": 3}, "strategy": "ulysses"}),
    ],
)
def test_cudnn_computes_odd_numbers_of_tokens(monkeypatch, queries, keys, how, lengths):
    """JAX's checks refuse their gradients, with a mask or without."""
    monkeypatch.setattr(call, "platform_of", lambda mesh: "cuda")
    how = {**how, **({"mesh": mesh_of(how["mesh"])} if "mesh" in how else {})}
    if lengths is not None:
        how["key_lengths"] = np.minimum(lengths, keys)
    q, _, _, dout = inputs((6, 3), queries, "bfloat16")
    _, k, v, _ = inputs((6, 3), keys, "bfloat16")
    with cudnn_on_cpus(monkeypatch):
        mine, right = (
            both_ways(partial(cfp.attention, implementation=name, **how), q, k, v, dout)
            for name in ("cudnn", "xla")
        )
    for one, other in zip(mine, right, strict=True):
        assert distance(one, other) < 2e-2


@pytest.mark.parametrize(("queries", "keys"), [(9, 8), (8, 7), (8, 6), (8, 8), (7, 8)])
def test_cudnn_has_lengths_for_windows_over_more_queries_than_keys(
    cudnn_on_cpu, queries, keys
):
    """cuDNN computes no such window without: "only supported with s_q <= s_kv"."""
    q, k = (jnp.ones((2, n, 2, 8), jnp.bfloat16) for n in (queries, keys))
    attend = partial(cfp.attention, implementation="cudnn", causal=True, window=(3, 0))
    text = str(jax.make_jaxpr(attend)(q, k, k))
    assert "sliding_window_length=4" in text
    assert ("PADDING_CAUSAL" in text) == (queries > keys)


def test_a_jax_that_names_cudnn_otherwise_is_said_so(cudnn_on_cpu):
    q, k, v, _ = inputs((2, 2), 8, "bfloat16")
    with pytest.raises(cfp.CfpError, match="Sharded keys cannot use cuDNN"):
        cudnn._find("another_name", q, k, v, SCORES, NO_MASK)


def test_axes_of_a_mesh_may_be_explicit():
    """As those of `jax.make_mesh` are in newer releases of JAX."""
    axes = {"axis_types": (jax.sharding.AxisType.Explicit,)}
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], **axes)
    q, k = (jnp.ones((1, 32, heads, 8)).at[:, 3:].set(0.5) for heads in (4, 2))
    right = cfp.attention(q, k, k, causal=True)
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    placed = [jax.device_put(x, spec) for x in (q, k, k)]
    jitted = jax.jit(cfp.attention, static_argnames=STATIC)
    for attend, args in ((cfp.attention, (q, k, k)), (jitted, placed)):
        found = attend(*args, causal=True, mesh=mesh, strategy="ring")
        assert jnp.allclose(found, right, atol=1e-6)


def test_no_two_kinds_share_the_name_of_a_kernel():
    assert len({*kinds.KERNELS}) == len(kinds.KERNELS)
