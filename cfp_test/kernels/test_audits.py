"""Collectives and memory of compiled programs of attention."""

import re
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.kernels import chunked
from cfp.profiling.hlo import collectives_in
from cfp_test.kernels.matrix import mesh_of

BATCH, HEADS, KV_HEADS, HEAD_DIM = 1, 8, 4, 8
LOCAL = 96  # Tokens of a rank, a number that no other dim has.
CHUNK = 32
FLOAT_BYTES = 4


def compiled(strategy, ranks, causal=True, implementation="chunked", tokens=None):
    """Forward and backward of an attention, and nothing else."""
    mesh = mesh_of({"x": ranks})
    tokens = tokens or LOCAL * ranks
    spec = jax.sharding.PartitionSpec(None, "x")
    sharding = jax.sharding.NamedSharding(mesh, spec)

    def run(q, k, v, dout):
        out, pull = jax.vjp(
            lambda q, k, v: cfp.attention(
                q,
                k,
                v,
                causal=causal,
                mesh=mesh,
                strategy=strategy,
                implementation=implementation,
                zigzag_tokens=strategy == "zigzag",
            ),
            q,
            k,
            v,
        )
        return out, *pull(dout)

    shapes = [(BATCH, tokens, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding) for s in shapes]
    with patch.object(chunked, "CHUNK", CHUNK):
        return (
            jax.jit(run, in_shardings=(sharding,) * 4, out_shardings=(sharding,) * 4)
            .lower(*args)
            .compile()
        )


def sent(program):
    """(kind, bytes) -> how often."""
    found = collectives_in(program.as_text())
    return {(one.kind, one.bytes): one.count for one in found}


@pytest.fixture(scope="module")
def ring():
    return {ranks: compiled("ring", ranks) for ranks in (4, 8)}


def test_ulysses_sends_its_all_to_alls_and_nothing_else():
    """q, k, v and the output there and back, the gradients the other way round."""
    token = BATCH * LOCAL * HEAD_DIM * FLOAT_BYTES  # Of a head, on a rank.
    assert sent(compiled("ulysses", 4)) == {
        ("all-to-all", token * HEADS): 4,
        ("all-to-all", token * KV_HEADS): 4,
    }


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_ring_sends_keys_and_values_once_a_step(ring, ranks):
    """In the backward pass, again, and the gradients of them once more to get home.

    Forward keys and values go each by themselves, without a copy into one array.

    If the compiler took rounds of both passes for one, it would keep their blocks from
    one pass to the other, and there were fewer.
    """
    block = 2 * BATCH * LOCAL * KV_HEADS * HEAD_DIM * FLOAT_BYTES
    rounds = ranks - 1
    assert sent(ring[ranks]) == {
        ("collective-permute", block // 2): 2 * rounds,
        ("collective-permute", block): 2 * rounds + 1,
    }


def test_a_ring_keeps_no_copy_per_step(ring):
    four, eight = (ring[n].memory_analysis().temp_size_in_bytes for n in (4, 8))
    assert four == eight > 0


def test_zigzag_sends_and_keeps_what_the_ring_does(ring):
    zigzag = compiled("zigzag", 4)
    assert sent(zigzag) == sent(ring[4])


def test_two_ranks_send_gradients_in_the_dtype_of_keys():
    """Nothing is added on the way to what one other rank sees of a block."""
    block = 2 * BATCH * LOCAL * KV_HEADS * HEAD_DIM * FLOAT_BYTES
    half = jax.jit(
        jax.grad(
            lambda q, k, v: (
                cfp.attention(
                    q,
                    k,
                    v,
                    causal=True,
                    mesh=mesh_of({"x": 2}),
                    strategy="zigzag",
                    implementation="chunked",
                    zigzag_tokens=True,
                )
                .astype(jnp.float32)
                .sum()
            ),
            argnums=(0, 1, 2),
        )
    )
    args = [
        jax.ShapeDtypeStruct((BATCH, 2 * LOCAL, n, HEAD_DIM), jnp.bfloat16)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    ]
    program = half.lower(*args).as_text()
    permutes = re.findall(r"collective_permute.*?-> tensor<([\dx]+)x(\w+)>", program)
    shape = f"{BATCH}x{LOCAL}x{KV_HEADS}x{HEAD_DIM}"
    assert sorted(permutes) == sorted(
        [(shape, "bf16")] * 2 + [(f"2x{shape}", "bf16")] * 2
    )
    assert sent(compiled("zigzag", 2)) == {
        ("collective-permute", block // 2): 2,
        ("collective-permute", block): 2,
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_zigzag_has_no_branches(ranks):
    """A rank chooses its rows, not a program; in a plain ring some have no work."""
    programs = (
        compiled(strategy, ranks, implementation="xla").as_text()
        for strategy in ("zigzag", "ring")
    )
    assert [" conditional(" in program for program in programs] == [False, True]


def test_gathering_sends_keys_once_a_pass():
    tokens = LOCAL * 4
    whole = 2 * BATCH * tokens * KV_HEADS * HEAD_DIM * FLOAT_BYTES
    assert sent(compiled("all_gather", 4)) == {
        ("all-gather", whole): 2,
        ("reduce-scatter", whole): 1,
    }


@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_no_score_matrix_is_left(ring, strategy):
    program = ring[4] if strategy == "ring" else compiled("ulysses", 4)
    assert _squares(program.as_text()) == []
    # The same search finds it where there is one.
    kept = compiled(strategy, 2, implementation="xla").as_text()
    assert _squares(kept) != []


def _squares(hlo):
    """Shapes with two dims of as many tokens as a rank has, or more."""
    found = []
    for dims in set(re.findall(r"\bf32\[([\d,]+)\]", hlo)):
        long = [dim for dim in map(int, dims.split(",")) if dim >= LOCAL]
        if len(long) > 1:
            found.append(dims)
    return found


def test_permutes_are_issued_before_the_computation_of_their_step():
    """In the program as it is traced: nothing of the step is needed for them."""
    ranks = 4
    mesh = mesh_of({"x": ranks})
    q = jax.ShapeDtypeStruct((1, 8 * ranks, 2, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(
        lambda q: cfp.attention(q, q, q, mesh=mesh, strategy="ring")
    )(q)
    # The first step, those of a loop, and the last, which has nothing to send: of keys
    # and of values one each.
    round_ = "permute permute compute"
    assert " ".join(_steps(jaxpr.jaxpr)) == f"{round_} {round_} compute"


def _steps(jaxpr):
    """Lists collectives and products, in order, in loops and out of them."""
    computing = False
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "ppermute":
            computing = False
            yield "permute"
        elif name == "dot_general" and not computing:
            computing = True
            yield "compute"
        elif name in ("scan", "shard_map", "custom_vjp_call", "jit", "pjit"):
            inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
            found = list(_steps(getattr(inner, "jaxpr", inner)))
            computing = computing and not found
            yield from found
