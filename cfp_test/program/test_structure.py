"""Identity of programs: by their structure, or by all that they compute with."""

import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from cfp.program.graph import Program
from cfp.program.part import cut_part, numbered
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.cli.cli_runner import environment
from cfp_test.support.checking import make_mesh
from cfp_test.support.forking import quick_python

MESH = make_mesh((("x", 2),))
X = jnp.ones((4, 6))


def read(fn, *args) -> Program:
    return trace(flatten_step(fn, args or (X,)), MESH)[0]


def structures(program: Program) -> tuple:
    """Facts that a plan and a measurement of all of it depend on."""
    part = cut_part(program, [op.id for op in program.ops if op.parent < 0])
    return program.fingerprint, numbered(program, part).digest


def by_hand(body):
    return jax.shard_map(
        body, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )


# What a constant may be for. Pairs of equal values make a program in which they merge.
USES = {
    "scale": lambda x, c: x * c,
    "shift": lambda x, c: x + jnp.asarray(c, x.dtype),
    "scalars": lambda x, c: x * (jnp.asarray(c, x.dtype) * 0.5 + 1),
    "below": lambda x, c: jnp.where(x < c, x, c),
    "clip": lambda x, c: jnp.clip(x, -1.0, c),
    "integers": lambda x, c: x + (x.astype(jnp.int32) % int(100 * c + 1)),
    "reduce": lambda x, c: x + jax.lax.reduce(x, x.dtype.type(c), jax.lax.add, (0,)),
    "narrow": lambda x, c: (x.astype(jnp.bfloat16) * c).astype(x.dtype),
    "loop": lambda x, c: jax.lax.fori_loop(0, 3, lambda _, y: y * c + 0.5, x),
    "branch": lambda x, c: jax.lax.cond(
        x[0, 0] > c, lambda y: y * c, lambda y: y - c, x
    ),
    "jitted": lambda x, c: jax.jit(lambda y: y * c + 0.5 * c)(x),
    "sharded": lambda x, c: by_hand(lambda y: y * c + 0.5)(x),
    "composite": lambda x, c: jax.lax.composite(lambda y: y * c + 0.5, "cfp.two")(x),
    "table": lambda x, c: x + np.full(x.shape, c, x.dtype).cumsum(0),
    "gradient": lambda x, c: jax.grad(lambda y: jnp.sum(jnp.tanh(y * c) ** 2))(x),
}
VALUES = st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, 3e-4, float("inf")])


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_values_of_constants_are_no_structure(data):
    uses = data.draw(st.lists(st.sampled_from(sorted(USES)), min_size=1, max_size=4))
    drawn = st.lists(VALUES.filter(np.isfinite), min_size=len(uses), max_size=len(uses))

    def with_values(values):
        def step(x):
            for use, value in zip(uses, values, strict=True):
                x = USES[use](x, value)
            return x

        return read(step)

    values, others = data.draw(drawn), data.draw(drawn)
    one, other = with_values(values), with_values(others)
    assert structures(one) == structures(other)
    assert [op.name for op in one.ops] == [op.name for op in other.ops]
    if values == others and list(map(np.signbit, values)) == list(
        map(np.signbit, others)
    ):
        assert one.content == other.content


@pytest.mark.parametrize("use", sorted(USES))
def test_programs_of_other_constants_compute_otherwise(use):
    one, same, other = (
        read(lambda x, c=c: USES[use](x, c)) for c in (0.5, 0.5, np.float32(0.25))
    )
    assert one.content == same.content != other.content


LONG = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)


def changed(table, value):
    table = table.copy()
    table[-1, -1] = value
    return table


@pytest.mark.parametrize(
    "one, other",
    [
        (np.float32(0.0), np.float32(-0.0)),
        (np.float32(np.nan), np.float32(np.inf)),
        (jnp.bfloat16(1.0), jnp.bfloat16(1.0078125)),
        (np.complex64(1 + 2j), np.complex64(1 - 2j)),
        (changed(LONG, 0.0), changed(LONG, -0.0)),
        (jnp.asarray(LONG), jnp.asarray(changed(LONG, np.nan))),
        (LONG.astype(np.complex64), changed(LONG.astype(np.complex64), 1j)),
        (LONG > 0, LONG > 0.1),
    ],
    ids=lambda c: f"{c.dtype}{list(c.shape)}",
)
def test_every_bit_of_every_constant_counts_for_compiled_programs(one, other):
    x = jnp.ones((64, 64))
    first, second = (read(lambda x, c=c: (x * c,), x) for c in (one, other))
    assert first.content != second.content
    assert structures(first) == structures(second)


def test_types_of_constants_are_structure():
    kinds = (jnp.float32, jnp.bfloat16, jnp.int32)
    programs = [read(lambda x, k=k: (x, jnp.asarray(1, k))) for k in kinds]
    assert len({p.fingerprint for p in programs}) == 3


def scanned(length):
    return lambda x: jax.lax.scan(lambda c, _: (c * 0.5, None), x, None, length=length)


def counted_down(start):
    return lambda x: jax.lax.while_loop(
        lambda c: c[0] > 0, lambda c: (c[0] - 1, jnp.sin(c[1])), (start, x)
    )


def in_steps_of(size):
    return lambda x: jax.lax.while_loop(
        lambda c: c[0] < 12, lambda c: (c[0] + size, jnp.sin(c[1])), (0, x)
    )


def found_by_another_loop(trips):
    def step(x):
        count = jax.lax.fori_loop(0, trips, lambda i, n: n + 2, 0)
        return jax.lax.fori_loop(0, count, lambda _, c: jnp.sin(c), x)

    return step


SHAPING = {
    "trips": (scanned(3), scanned(4)),
    "nested": (lambda x: scanned(2)(scanned(3)(x)[0]), lambda x: scanned(6)(x)),
    "first": tuple(
        lambda x, n=n: jax.lax.fori_loop(n, 8, lambda _, c: c * 0.5, x) for n in (2, 3)
    ),
    "down": (counted_down(5), counted_down(6)),
    "stride": (in_steps_of(2), in_steps_of(3)),
    "other loop": (found_by_another_loop(2), found_by_another_loop(3)),
    "by hand": (by_hand(scanned(3)), by_hand(scanned(4))),
    "place read": tuple(
        lambda x, n=n: jax.lax.dynamic_slice(x, (jnp.int32(n), 0), (1, 6))
        for n in (1, 2)
    ),
    "place written": tuple(
        lambda x, n=n: jax.lax.dynamic_update_slice(x, x[:1], (jnp.int32(n), 0))
        for n in (1, 2)
    ),
    "row": tuple(lambda x, n=n: x.at[jnp.int32(n)].set(0.5) for n in (1, 2)),
    "dim": tuple(lambda x, n=n: jnp.sum(x @ x.T, n) for n in (0, 1)),
    "precision": tuple(
        lambda x, p=p: jnp.dot(x, x.T, precision=p) for p in ("default", "highest")
    ),
    "composite": tuple(
        lambda x, f=f: jax.lax.composite(f, "cfp.one")(x) for f in (jnp.sin, jnp.cos)
    ),
}


@pytest.mark.parametrize("name", SHAPING)
def test_what_shapes_a_program_is_structure(name):
    one, other = (structures(read(fn)) for fn in SHAPING[name])
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_what_a_table_looks_up_is_no_structure():
    one, other = (
        read(lambda x, rows=rows: x[rows])
        for rows in (np.arange(32) % 4, np.arange(32) % 3)
    )
    assert structures(one) == structures(other)
    assert one.content != other.content


def test_constants_of_equal_values_stay_apart():
    program = read(lambda x: (x * 0.5 + 0.5).clip(0.5, 0.5))
    constants = [op for op in program.ops if op.kind == "constant"]
    assert len(constants) == 4
    assert [len(program.users[op.results[0]]) for op in constants] == [1] * 4


CONTEXTS = """
import gc
import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from cfp.program.step import flatten_step
from cfp.program.trace import trace

MANY = 12  # Since JAX 0.12 up to eleven programs in a row share a context.

def read(scale):
    def step(x):
        def layer(x, _):
            return x * scale, None

        return jax.lax.scan(layer, x, None, length=3)[0]

    return trace(flatten_step(step, (jnp.ones((4, 6)),)), jax.make_mesh((2,), ("x",)))

def count():
    jax.clear_caches()
    gc.collect()
    return ir.Context._get_live_count()

read(1.0)
before = count()
for number in range(MANY):
    read(float(number))
after = count()
held = [read(1.0) for _ in range(MANY)]
print(before, after, count())
"""


def test_nothing_is_held_of_programs_that_are_gone(tmp_path):
    """With a context all constants of its program stay in memory."""
    flags = "--xla_force_host_platform_device_count=2"
    ended = subprocess.run(
        [quick_python(), "-c", CONTEXTS],
        cwd=tmp_path,
        env=environment(XLA_FLAGS=flags, JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    before, after, holding = map(int, ended.stdout.split())
    assert after <= before < holding
