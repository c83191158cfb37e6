from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec as P

from cfp.analysis.strategies import legal_axes
from cfp.program import shardy
from cfp.program.graph import Program, dtype_bytes
from cfp.program.read import sources_of
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.programs.registry import PROGRAMS
from cfp_test.support.checking import make_mesh

MESH = make_mesh((("x", 4),))
X = jnp.ones((8, 16))


def read(fn, *args) -> Program:
    return trace(flatten_step(fn, args), MESH)[0]


def only(program: Program, kind: str):
    (op,) = (op for op in program.ops if op.kind == kind)
    return op


def test_values_and_ops():
    program = read(lambda x, w: jnp.tanh(x @ w), X, jnp.ones((16, 4), jnp.bfloat16))
    dot = only(program, "dot_general")
    assert [str(program.values[v]) for v in dot.operands] == ["f32[8,16]", "f32[16,4]"]
    assert program.values[dot.results[0]].producer == dot.id
    assert program.values[dot.results[0]].size_bytes == 8 * 4 * 4
    tanh = only(program, "tanh")
    assert program.users[dot.results[0]] == ((tanh.id, 0),)
    assert program.outputs == tanh.results
    assert dot.rule.reduction == {2}
    assert tanh.rule.sizes == (8, 4)


def test_scopes_and_sources():
    def train_step(x):
        with jax.named_scope("outer"):
            return jax.grad(lambda x: (x @ x.T).sum())(x)

    program = read(train_step, X)
    dots = [op for op in program.ops if op.kind == "dot_general"]
    assert all(op.scope.startswith("jit(train_step)/outer/") for op in dots)
    assert any("transpose(" in op.scope for op in dots)
    file, _, line = dots[0].source.partition(":")
    assert file == "test_read.py"
    assert int(line) > 0


def test_files_of_one_name_are_told_apart(tmp_path):
    layers = []
    for folder in ("encoder", "decoder"):
        defined, path = {}, tmp_path / folder / "layer.py"
        exec(compile("def run(x): return x @ x.T", str(path), "exec"), defined)
        layers.append(defined["run"])

    def step(x):
        return layers[0](x) + layers[1](2 * x) + x @ x

    line = step.__code__.co_firstlineno + 1
    wanted = ["encoder/layer.py:1", "decoder/layer.py:1", f"test_read.py:{line}"]
    program = read(step, jnp.ones((8, 8)))
    dots = [op for op in program.ops if op.kind == "dot_general"]
    assert [op.source for op in dots] == wanted
    assert [*sources_of(program, [op.id for op in dots])] == wanted


def test_a_product_in_a_librarys_loop_has_the_users_line(tmp_path):
    path, library = tmp_path / "site-packages" / "library.py", {}
    code = "def run(scan, x): return scan(lambda c, _: (c @ c, None), x, None, 3)[0]"
    exec(compile(code, str(path), "exec"), library)

    def step(x):
        return library["run"](jax.lax.scan, x)

    line = step.__code__.co_firstlineno + 1
    alone = partial(library["run"], jax.lax.scan)
    for fn, wanted in ((step, f"test_read.py:{line}"), (alone, "library.py:1")):
        program = read(fn, jnp.ones((8, 8)))
        dot = only(program, "dot_general")
        assert dot.parent >= 0 and dot.source == wanted
        assert [*sources_of(program, [dot.id])] == [wanted]


def scan(length, x):
    return jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=length)


def repeats(program: Program, kind: str) -> list[int]:
    return sorted({op.repeat for op in program.ops if op.kind == kind})


def test_trip_counts():
    assert repeats(read(lambda x: scan(7, x), X), "sine") == [7]
    assert repeats(
        read(lambda x: jax.lax.fori_loop(2, 8, lambda i, c: jnp.sin(c), x), X), "sine"
    ) == [6]
    nested = read(lambda x: scan(3, jnp.sin(scan(5, x)[1]))[0], X)
    assert repeats(nested, "sine") == [1, 3, 5]

    def twice(x):
        return jax.lax.scan(lambda c, _: (scan(5, c)[0], None), x, None, length=3)[0]

    assert repeats(read(twice, X), "sine") == [15]


def counted(step, limit, *more):
    """Returns a loop's trip count; its state is a counter, an array and `more`."""

    def loop(x):
        def body(c):
            return c[0] + step(c), jnp.sin(c[1]), *(one - 1 for one in c[2:])

        return jax.lax.while_loop(lambda c: c[0] < limit(c), body, (0, x, *more))[1]

    program = read(loop, X)
    found = None if only(program, "while").uncounted else repeats(program, "sine")
    return found


def test_trip_counts_follow_the_step_of_the_counter():
    assert counted(lambda c: 20, lambda c: 100) == [5]
    assert counted(lambda c: 30, lambda c: 100) == [4]
    assert counted(lambda c: 20, lambda c: -1) == [0]
    assert counted(lambda c: c[2], lambda c: 100, 20) is None
    assert counted(lambda c: 0, lambda c: 100) is None
    assert counted(lambda c: 1, lambda c: c[2], 100) is None

    def step_first(x):
        body, state = lambda c: (20 + c[0], jnp.sin(c[1])), (0, x)
        return jax.lax.while_loop(lambda c: c[0] < 100, body, state)[1]

    assert repeats(read(step_first, X), "sine") == [5]


@pytest.mark.parametrize(
    ("dtype", "start", "limit", "step", "trips"),
    [
        ("int8", 5, 28, 100, [1]),
        ("int8", 5, 28, 127, None),
        ("uint8", 253, 254, 2, [1]),
        ("uint8", 105, 106, 255, None),
        ("uint32", 2, 5, 2**32 - 1, None),
        ("int4", 0, 7, 3, None),
        ("int4", 0, 6, 3, [2]),
    ],
)
def test_counters_that_overflow_have_no_trip_count(dtype, start, limit, step, trips):
    """Their next value is below the limit again."""
    of = np.dtype(dtype).type

    def loop(x):
        def body(c):
            return c[0] + of(step), jnp.sin(c[1])

        return jax.lax.while_loop(lambda c: c[0] < of(limit), body, (of(start), x))[1]

    program = read(loop, X)
    whiles = [op for op in program.ops if op.kind == "while"]
    assert len(whiles) == (trips != [1])
    assert any(op.uncounted for op in whiles) == (trips is None)
    assert repeats(program, "sine") == (trips or [1])


def test_trip_counts_that_are_not_known():
    def until_small(x):
        return jax.lax.while_loop(lambda c: c.sum() > 1, lambda c: jnp.sin(c), x)

    def from_an_argument(x, n):
        return jax.lax.fori_loop(0, n, lambda i, c: jnp.sin(c), x)

    def down(x):
        return jax.lax.while_loop(
            lambda c: c[0] > 0, lambda c: (c[0] - 1, jnp.sin(c[1])), (5, x)
        )[1]

    assert repeats(read(until_small, X), "sine") == [1]
    assert repeats(read(from_an_argument, X, jnp.int32(4)), "sine") == [1]
    assert repeats(read(down, X), "sine") == [1]


def test_a_counter_may_run_further_than_an_index_of_python():
    most = jnp.iinfo(jnp.uint32).max

    def far(x):
        def body(c):
            return c[0] + jnp.uint64(1), jnp.sin(c[1])

        return jax.lax.while_loop(
            lambda c: c[0] < jnp.uint64(2**64 - 1), body, (jnp.uint64(most), x)
        )[1]

    with jax.enable_x64(True):
        assert repeats(read(far, X), "sine") == [2**64 - 2**32]


def test_loops_close_their_bodies():
    program = read(lambda x: scan(7, x), X)
    loop = only(program, "while")
    assert loop.id == max(loop.body) + 1
    assert all(program.ops[i].parent == loop.id for i in loop.body)
    assert len(loop.yields) == len(loop.results) == len(loop.operands)
    assert len(loop.entries) == 2 * len(loop.operands)  # the condition's, the body's
    for place, entry in enumerate(loop.entries[len(loop.operands) :]):
        assert program.values[entry].origin == loop.operands[place]


def test_branches_yield_in_turn():
    def train_step(x, flag):
        return jax.lax.cond(flag, jnp.sin, jnp.cos, x)

    program = read(train_step, X, jnp.bool_(True))
    branch = only(program, "case")
    makers = [program.ops[program.values[v].producer].kind for v in branch.yields]
    assert makers == ["cosine", "sine"]
    assert branch.repeat == 1


def test_leaves_depend_on_nothing():
    program = read(lambda x: x + jnp.arange(16.0) * 2, X)
    kinds = {program.ops[i].kind for i in program.leaf_ops}
    assert "iota" in kinds
    assert "add" not in kinds


def test_attributes_tell_ops_apart():
    program = read(lambda x: (x.max(0), x.min(0), x[1:], x[:-1]), X)
    for kind in ("reduce", "slice"):
        first, second = (op for op in program.ops if op.kind == kind)
        assert first.attributes != second.attributes


def test_large_constants():
    """Two that are not printed count as different; their text stays short."""
    table = jax.random.normal(jax.random.key(0), (64, 64))
    program = read(lambda x: (x @ table, x @ (table + 1)), jnp.ones((8, 64)))
    texts = {op.attributes for op in program.ops if op.kind == "constant"}
    assert len(texts) == 2
    assert max(map(len, texts)) < 100


def test_regions_sharded_by_hand():
    fn, args = PROGRAMS["shard_map"]()
    program, _ = trace(flatten_step(fn, args), MESH)
    forward, _ = (op for op in program.ops if op.kind == "manual_computation")
    rows, whole = (("x",), ()), ((), ())
    assert forward.shardings[: len(forward.operands)] == (rows, whole)
    assert ((),) in forward.shardings[len(forward.operands) :]
    assert forward.rule is None
    assert forward.body == ()


def test_no_rules_stay_in_regions_sharded_by_hand():
    """XLA refused a step with one in a loop, once its program had been read."""
    fn, args = PROGRAMS["shard_map"]()
    _, lowering = trace(flatten_step(fn, args), MESH)
    assert "manual_computation" in str(lowering.module)
    assert shardy.RULE not in str(lowering.module)


def by_hand(body):
    return jax.shard_map(
        body, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )


def regions_of(bodies):
    """The attributes of regions sharded by hand, one for each body."""
    program = read(lambda x: [by_hand(body)(x) for body in bodies], X)
    return [op.attributes for op in program.ops if op.kind == "manual_computation"]


def test_regions_differ_by_what_their_loops_read():
    def repeated(body):
        return lambda x: jax.lax.fori_loop(0, 3, lambda _, c: body(c, x), x)

    bodies = [jnp.subtract, lambda c, x: x - c, jnp.subtract]
    one, other, same = regions_of(map(repeated, bodies))
    assert one == same != other


def test_regions_differ_by_the_types_they_compute_in():
    def rounded(dtype):
        return lambda x: x.astype(dtype).astype(x.dtype)

    kinds = [jnp.bfloat16, jnp.float16, jnp.bfloat16]
    one, other, same = regions_of(map(rounded, kinds))
    assert one == same != other


def test_fingerprint_is_blind_to_names_and_shardings():
    def one(x):
        return jnp.tanh(x @ x.T)

    def other(y):
        with jax.named_scope("elsewhere"):
            return jnp.tanh(y @ y.T)

    same = {read(one, X).fingerprint, read(other, X).fingerprint}
    assert len(same) == 1
    assert read(one, jnp.ones((8, 8))).fingerprint not in same


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("i1", 1),
        ("i4", 1),
        ("ui8", 1),
        ("bf16", 2),
        ("f8E4M3FN", 1),
        ("f4E2M1FN", 1),
        ("i64", 8),
        ("complex<f32>", 8),
        ("tf32", 4),
    ],
)
def test_bytes(dtype, expected):
    assert dtype_bytes(dtype) == expected


# What Shardy's rules promise and XLA's partitioner does not keep.


def correction(name: str, kind: str) -> list:
    fn, args, *_ = PROGRAMS[name]()
    program, _ = trace(flatten_step(fn, args), MESH)
    return [op.rule for op in program.ops if op.kind == kind]


def test_convolutions_keep_their_windows_whole():
    for rule in correction("conv_net", "convolution"):
        free = {f for f, s in enumerate(rule.sizes) if s > 1 and f not in rule.fixed}
        assert len(free) == 3  # batch, features in, features out
        assert len(rule.reduction) == 1


def test_grouped_convolutions_shard_groups_and_batch_only():
    _, grouped, weight, *_ = correction("grouped_conv", "convolution")
    assert grouped.reduction == frozenset()
    (rows,) = weight.reduction
    assert weight.over_all == {rows}
    wanted = [["x", "y"] if f == rows else [] for f in range(len(weight.sizes))]
    assert legal_axes(weight, wanted, {"x": 2, "y": 2})[rows] == ("x", "y")
    wanted[rows] = ["x"]
    assert legal_axes(weight, wanted, {"x": 2})[rows] == ("x",)
    assert legal_axes(weight, wanted, {"x": 2, "y": 2})[rows] == ()


def test_pads_that_cut_off_and_spread_keep_that_dim_whole():
    def padded(low, inside):
        program = read(lambda x: jax.lax.pad(x, 0.0, [(low, 1, inside), (0, 0, 0)]), X)
        (rule,) = (op.rule for op in program.ops if op.kind == "pad")
        return rule

    assert padded(-1, 1).held
    assert padded(-1, 1).results[0][0][0] in padded(-1, 1).fixed
    assert not padded(-1, 0).held
    assert not padded(1, 1).held


def test_writes_to_one_place_keep_that_dim_whole():
    program = read(lambda x, i: x.at[i].set(0.5), X, jnp.int32(2))
    (rule,) = (op.rule for op in program.ops if op.kind == "scatter")
    assert rule.results[0][0][0] in rule.fixed
    assert rule.results[0][1][0] not in rule.fixed
    several = read(lambda x, i: x.at[i].set(0.5), X, jnp.arange(3))
    (rule,) = (op.rule for op in several.ops if op.kind == "scatter")
    assert rule.results[0][0][0] not in rule.fixed


def test_a_write_to_one_row_of_a_cache_keeps_positions_whole_and_not_heads():
    for rule in correction("decoding", "scatter"):
        _, length, heads, size = (dim[0] for dim in rule.results[0])
        assert length in rule.fixed
        assert not {heads, size} & rule.fixed


def test_updates_of_one_place_keep_that_dim_whole():
    def update(x, piece, i):
        return jax.lax.dynamic_update_slice_in_dim(x, piece, i, 0)

    program = read(update, X, X[:1], jnp.int32(99))
    (rule,) = (op.rule for op in program.ops if op.rule and op.operands[3:])
    assert rule.results[0][0][0] in rule.fixed
    assert rule.results[0][1][0] not in rule.fixed


def test_foreign_code_is_opaque():
    program = read(lambda x: jnp.linalg.svd(x, compute_uv=False), jnp.ones((8, 8)))
    (call,) = (op for op in program.ops if op.kind == "custom_call")
    assert call.rule is None
    batch = read(lambda x: jnp.linalg.svd(x, compute_uv=False), jnp.ones((4, 8, 8)))
    assert batch.outputs


def test_the_code_inside_of_an_op_captures_nothing():
    """Else a part of a program that is cloned elsewhere reads what is gone."""
    for name in ("sorting", "windows", "segments", "moe_sort"):
        fn, args, *_ = PROGRAMS[name]()
        step = flatten_step(fn, args, {})
        _, lowering = trace(step, MESH)
        for op in shardy.walk(shardy.main_function(lowering.module)):
            if op.name in shardy.REGION_OPS:
                continue
            for region in op.regions:
                for block in region.blocks:
                    for inner in (o.operation for o in block.operations):
                        for value in inner.operands:
                            owner = value.owner
                            at_home = (
                                owner == block
                                if isinstance(owner, ir.Block)
                                else owner.operation.parent == op
                            )
                            assert at_home, (name, str(inner))
