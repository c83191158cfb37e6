"""Scatters that programs compute in another way than JAX writes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import cfp
from cfp.program.step import flatten_step
from cfp.program.trace import lower_step, read_lowering
from cfp_test.support.checking import make_mesh

MESH = make_mesh((("x", 4),))
WHOLE = NamedSharding(MESH, PartitionSpec())


def lowered(function, *args):
    """Lowers a function for four devices: its program, and what compiles it."""
    step = flatten_step(function, args)
    lowering = lower_step(step, [WHOLE] * len(step.avals), WHOLE)
    return read_lowering(step, lowering), lowering


def gradient_of_lookup(kind=jnp.bfloat16):
    """The gradient of a table in float32 that is looked up in fewer bits."""

    def function(table, ids, gradient):
        _, backward = jax.vjp(lambda table: table.astype(kind)[ids], table)
        return backward(gradient)[0]

    return function


def scattered(program):
    return [op.results[0] for op in program.ops if op.kind == "scatter"]


def kinds_of_scatters(program):
    return [program.values[value].dtype for value in scattered(program)]


@settings(deadline=None, max_examples=20)
@given(
    kind=st.sampled_from([jnp.bfloat16, jnp.float16]),
    rows=st.integers(1, 5),
    tokens=st.integers(1, 3000),
    seed=st.integers(0, 2**31 - 1),
)
def test_a_sum_is_rounded_once(kind, rows, tokens, seed):
    random = np.random.default_rng(seed)
    ids = random.integers(0, rows, tokens).astype(np.int32)
    gradient = jnp.asarray(random.normal(size=(tokens, 3)), kind)
    args = jnp.ones((rows, 3)), ids, gradient
    program, lowering = lowered(gradient_of_lookup(kind), *args)
    assert kinds_of_scatters(program) == ["f32"]
    assert program.rewritten.counts["wide_sums"] == 1
    [found] = lowering.lowered.compile()(*args)
    exact = np.zeros((rows, 3))
    np.add.at(exact, ids, np.asarray(gradient, np.float64))
    # Half of the last place of 16 bits, and what float32 loses of all that was added.
    spread = np.abs(np.asarray(gradient, np.float64)).sum(0)
    allowed = np.abs(exact) * float(jnp.finfo(kind).eps) / 2 + spread * 1e-6
    assert (np.abs(np.asarray(found) - exact) <= allowed + 1e-7).all()


def test_a_sum_in_16_bits_loses_what_is_small():
    """Shows that the step as JAX compiles it is far off."""
    ids, gradient = jnp.zeros(4096, jnp.int32), jnp.ones((4096, 2), jnp.bfloat16)
    args = jnp.ones((2, 2)), ids, gradient
    as_written = jax.jit(gradient_of_lookup())(*args)
    assert float(as_written[0, 0]) == 256.0  # 256 + 1 is 256 in bfloat16.
    [found] = lowered(gradient_of_lookup(), *args)[1].lowered.compile()(*args)
    assert float(found[0, 0]) == 4096.0


def put_in_order(table, ids, rows):
    """Rows that are put where tokens say; the result is no table of the program's."""
    return jnp.zeros((64, 4), jnp.bfloat16).at[ids].add(rows).sum() * table


def added_to_rows(table, ids, rows):
    return table.astype(jnp.bfloat16).at[ids].add(rows)


def each_to_a_row_of_its_own(table, ids, rows):
    zeros = jnp.zeros(table.shape, jnp.bfloat16)
    return zeros.at[ids].add(rows, unique_indices=True)


def largest(table, ids, rows):
    return jnp.zeros(table.shape, jnp.bfloat16).at[ids].max(rows)


def two_words_of_tokens(table, ids, rows):
    words = jnp.stack([ids % 4, ids % 3], axis=1)
    logits = jnp.concatenate([rows, rows], axis=1)
    _, backward = jax.vjp(lambda x: jnp.take_along_axis(x, words, axis=1), logits)
    return backward(rows[:, :2])[0] + table.sum().astype(rows.dtype)


def a_token_of_each_word(table, ids, rows):
    logits = jnp.concatenate([rows, rows], axis=1)
    _, backward = jax.vjp(lambda x: jnp.take_along_axis(x, ids[None], axis=0), logits)
    return backward(logits[:1])[0] + table.sum().astype(rows.dtype)


@pytest.mark.parametrize(
    "function",
    [
        put_in_order,
        added_to_rows,
        each_to_a_row_of_its_own,
        largest,
        two_words_of_tokens,
        a_token_of_each_word,
    ],
)
def test_other_scatters_stay(function):
    ids = jnp.arange(8, dtype=jnp.int32)
    program, _ = lowered(function, jnp.ones((16, 4)), ids, jnp.ones((8, 4), "bfloat16"))
    assert kinds_of_scatters(program) == ["bf16"]
    assert program.rewritten.counts["wide_sums"] == 0


def test_a_sum_in_float32_stays():
    args = jnp.ones((16, 4)), jnp.arange(8), jnp.ones((8, 4))
    program, _ = lowered(gradient_of_lookup(jnp.float32), *args)
    assert kinds_of_scatters(program) == ["f32"]
    assert program.rewritten.counts["wide_sums"] == 0


def words_of_tokens(logits, labels, gradient):
    """The gradient of what a cross-entropy takes: a number of each token."""

    def taken(logits):
        return jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]

    return jax.vjp(taken, logits)[1](gradient)[0]


@settings(deadline=None, max_examples=20)
@given(
    kind=st.sampled_from([jnp.bfloat16, jnp.float32]),
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    seed=st.integers(0, 2**31 - 1),
)
def test_a_word_of_each_token_is_selected(kind, shape, seed):
    random = np.random.default_rng(seed)
    *tokens, words = shape
    # Some labels count from the end, some are of no word, some gradients are no number.
    labels = random.integers(-words - 2, words + 2, tokens).astype(np.int32)
    gradient = random.choice([0.5, -2.0, np.nan, np.inf], tokens)
    args = jnp.ones(shape, kind), jnp.asarray(labels), jnp.asarray(gradient, kind)
    program, lowering = lowered(words_of_tokens, *args)
    # Dims of one are no batch to JAX.
    if min(shape) > 1:
        assert not any(program.values[v].shape[-1] == words for v in scattered(program))
    [found] = lowering.lowered.compile()(*args)
    expected = jax.jit(words_of_tokens)(*args)
    np.testing.assert_array_equal(
        *(np.asarray(x, np.float32) for x in (found, expected))
    )


def test_a_word_that_is_indexed_with_its_token_stays_a_scatter():
    def function(logits, labels, gradient):
        def taken(logits):
            return logits[jnp.arange(len(labels)), labels]

        return jax.vjp(taken, logits)[1](gradient)[0]

    labels = jnp.asarray([4, -1, 0, 2, 3, 3, 1])
    args = jnp.ones((7, 5)), labels, jnp.linspace(1.0, 2.0, 7)
    program, lowering = lowered(function, *args)
    assert kinds_of_scatters(program) == ["f32"]
    [found] = lowering.lowered.compile()(*args)
    np.testing.assert_array_equal(found, jax.jit(function)(*args))


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("words", [100, 128, 129, 256, 257, 600])
def test_labels_of_8_bits_have_one_word_each(kind, words):
    """Numbers of words start again where the type of labels has no further ones."""

    def function(logits, labels, gradient):
        def taken(logits):
            mode = "promise_in_bounds"
            return jnp.take_along_axis(logits, labels[:, None], axis=-1, mode=mode)

        return jax.vjp(taken, logits)[1](gradient[:, None])[0]

    labels = np.arange(min(words, np.iinfo(kind).max + 1)).astype(kind)
    gradient = np.linspace(1.0, 2.0, len(labels), dtype=np.float32)
    args = jnp.ones((len(labels), words)), labels, gradient
    [found] = lowered(function, *args)[1].lowered.compile()(*args)
    expected = np.zeros((len(labels), words), np.float32)
    expected[range(len(labels)), labels] = gradient
    np.testing.assert_array_equal(found, expected)


def test_sums_of_complex_numbers_stay():
    args = jnp.ones((4, 3), "complex64"), jnp.arange(4), jnp.full((4, 3), 1 + 2j)
    program, lowering = lowered(gradient_of_lookup("complex64"), *args)
    assert kinds_of_scatters(program) == ["complex<f32>"]
    [found] = lowering.lowered.compile()(*args)
    np.testing.assert_array_equal(found, args[2])


def test_a_sum_into_a_single_number_stays():
    def function(x):
        return jnp.zeros(()).at[...].add(x)

    program, lowering = lowered(function, jnp.float32(3.0))
    assert kinds_of_scatters(program) == ["f32"]
    assert lowering.lowered.compile()(jnp.float32(3.0))[0] == 3.0


def test_an_exported_gradient_is_added_up_in_float32():
    """Shows that an export leaves out what attributes are by default."""
    ids, gradient = jnp.zeros(4096, jnp.int32), jnp.ones((4096, 2), jnp.bfloat16)
    args = jnp.ones((2, 2)), ids, gradient
    exported = jax.export.export(jax.jit(gradient_of_lookup()))(*args)
    program, lowering = lowered(exported.call, *args)
    assert kinds_of_scatters(program) == ["f32"]
    [found] = lowering.lowered.compile()(*args)
    assert float(found[0, 0]) == 4096.0


@pytest.mark.explained("Summed in float32 instead of 16 bits")
@pytest.mark.parametrize("preset", ["data_parallel", "fully_sharded"])
def test_plans_add_up_in_float32_and_say_so(preset):
    def step(table, head, ids):
        def loss_of(table):
            rows = table.astype(jnp.bfloat16)[ids]
            return jnp.sum((rows @ head.astype(jnp.bfloat16)).astype(jnp.float32))

        return table - jax.grad(loss_of)(table)

    table, head = jnp.zeros((8, 16)), jnp.full((16, 4), 0.25)
    ids = jnp.zeros((4096,), jnp.int32)
    plan_settings = cfp.PlannerSettings(race=False)
    plan = cfp.plan(
        step, table, head, ids, mesh=MESH, preset=preset, settings=plan_settings
    )
    words = "ummed in float32 instead of 16 bits: 1 scatter (gradients of lookups"
    assert words in repr(plan)
    found = cfp.parallelize(step, mesh=MESH, plan=plan)(table, head, ids)
    # Each token adds 1 to each number of its row.
    assert np.asarray(found)[0].tolist() == [-4096.0] * 16
    assert not np.asarray(found)[1:].any()


def of_stacked_tables(tables, ids, kind):
    return tables.astype(kind)[1][ids]


def of_a_padded_table(table, ids, kind):
    return table.astype(kind)[:5][ids]


def of_numbers(table, ids, kind):
    return table[:, 0].astype(kind)[ids]


def of_a_layers_table(tables, ids, kind):
    def layer(total, table):
        return total + table.astype(kind)[ids], None

    zeros = jnp.zeros((len(ids), tables.shape[-1]), kind)
    return jax.lax.scan(layer, zeros, tables)[0]


@pytest.mark.parametrize(
    ("looked_up", "shape"),
    [
        (of_stacked_tables, (3, 6, 4)),
        (of_a_padded_table, (6, 4)),
        (of_numbers, (6, 4)),
        (of_a_layers_table, (3, 6, 4)),
    ],
)
def test_sums_in_which_many_meet_are_wide_whatever_the_table(looked_up, shape):
    def gradient(table, ids, kind=jnp.bfloat16):
        def total(table):
            return looked_up(table, ids, kind).astype(jnp.float32).sum()

        return jax.grad(total)(table)

    args = jnp.zeros(shape), jnp.zeros(4096, jnp.int32)
    program, lowering = lowered(gradient, *args)
    assert program.rewritten.counts["wide_sums"] == 1
    [found] = lowering.lowered.compile()(*args)
    exact = gradient(*args, kind=jnp.float32)
    assert float(exact.max()) == 4096.0
    np.testing.assert_array_equal(np.asarray(found), np.asarray(exact))


def test_sums_of_segments_are_wide_where_many_meet():
    def summed(rows, ids):
        return jax.ops.segment_sum(rows, ids, num_segments=4)

    args = jnp.ones((4096, 2), jnp.bfloat16), jnp.arange(4096) % 4
    program, lowering = lowered(summed, *args)
    assert program.rewritten.counts["wide_sums"] == 1
    assert (
        np.asarray(lowering.lowered.compile()(*args)[0]).tolist() == [[1024.0] * 2] * 4
    )
