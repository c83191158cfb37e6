"""Blocks and their members, from small programs and from those of the collection."""

import functools

import jax
import jax.numpy as jnp
import pytest

from cfp.analysis.analyze import build_frame
from cfp.analysis.flow import passes, scope_path
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.programs.registry import PROGRAMS, programs_on
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

SIZES = (("x", 4),)
MESH = make_mesh(SIZES)


def frame_of(make):
    fn, args, *rest = make() if callable(make) else make
    options = {k: v for k, v in (rest[0] if rest else {}).items() if k != "tolerance"}
    kwargs = options.pop("kwargs", {})
    program, _ = trace(flatten_step(fn, args, kwargs, **options), MESH)
    return build_frame(program, SIZES)


@functools.cache
def known_frame(name):
    """A program of the collection, analysed once for all tests."""
    return frame_of(PROGRAMS[name])


def members(frame):
    """For each block (kind, factors, cotangent) of its members."""
    ops = frame.program.ops
    return [
        [(ops[m.op].kind, m.factors, m.cotangent) for m in block.members]
        for block in frame.blocks
    ]


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("jit(step)/jvp(Net)/Dense_0/dot_general", "Net/Dense_0"),
        ("jit(step)/transpose(jvp(Net))/Dense_0/dot_general", "Net/Dense_0"),
        ("jit(step)/jvp()/while/body/closed_call/dot_general", "dot_general"),
        ("jit(step)/jvp()/while/body/eval_jaxpr/dot_general", "dot_general"),
        ("jit(f)/jvp(A)/while/body/layers/mlp/dot_general", "A/layers/mlp"),
        ("jit(step)/rematted_computation/a/dot", "a"),
        ("jit(step)/checkpoint/a/dot", "a"),
        ("jit(step)/jit(inner)/a/dot", "a"),
        ("jit(step)/jvp(jit(_take))/gather", "gather"),
        ("jit(step)/vmap(a)/dot", "a"),
        ("jit(step)/vmap(lib.nn.Dense)/layers.0/lib.Net/b/dot", "layers.0/b"),
        ("jit(step)/bsd,dhe->bshe/dot_general", "bsd,dhe->bshe"),
        ("dot_general", "dot_general"),
        ("", ""),
    ],
)
def test_scope_paths(scope, expected):
    assert scope_path(scope) == expected


def test_attention_exactly():
    frame = known_frame("attention")
    dot = "dot_general"
    # Factors in the order of Shardy: batch, then the result's others, then contracted.
    # For query, key and value batch 0, sequence 1, heads 2, head dim 3, hidden 4.
    projection = [(dot, (0, 1, 2, 3, 4), -1), (dot, (2, 3, 4, 0, 1), 0)]
    assert members(frame) == [
        projection,
        projection,
        projection,
        # scores: batch 0, heads 1, to 2, from 3, head dim 4
        [
            (dot, (0, 1, 2, 3, 4), -1),
            (dot, (0, 1, 3, 4, 2), 0),
            (dot, (0, 1, 2, 4, 3), 0),
        ],
        # weighted values
        [
            (dot, (0, 1, 2, 3, 4), -1),
            (dot, (0, 1, 3, 4, 2), 0),
            (dot, (0, 1, 2, 4, 3), 0),
        ],
        # output: batch 0, sequence 1, hidden 2, heads 3 and head dim 4 contracted
        [
            (dot, (0, 1, 2, 3, 4), -1),
            (dot, (2, 4, 3, 0, 1), 0),
            (dot, (0, 1, 4, 3, 2), 0),
        ],
    ]


def test_each_projection_gets_its_own_gradient():
    """Query, key and value share their input; only the cotangent tells them apart."""
    frame = known_frame("attention")
    program = frame.program
    for block in frame.blocks[:3]:
        weight = program.ops[block.anchor].operands[1]
        name = program.arg_names[program.args.index(weight)]
        (group,) = (g for g in frame.groups if program.arg_names[g.args[0]] == name)
        gradient = program.values[group.gradients[0]].producer
        assert gradient == block.members[1].op


def shape(frame):
    """Blocks by what they compute: names and sizes of contractions left out."""
    return [sorted(found, key=repr) for found in members(frame)]


def test_scanned_layers_have_the_blocks_of_unrolled_ones():
    scanned = known_frame("scan_transformer")
    unrolled = known_frame("transformer")
    assert len(scanned.blocks) == 1 + 8 + 1  # embedding, one layer, head
    assert shape(scanned)[1:9] == shape(unrolled)[9:17]
    assert {scanned.program.ops[b.anchor].repeat for b in scanned.blocks[1:9]} == {3}


@pytest.mark.parametrize("name", ["scan_remat", "module_scan"])
def test_rematerialized_contractions_join_their_block(name):
    frame = known_frame(name)
    assert len(frame.blocks) == 10
    ops = frame.program.ops
    for block in frame.blocks[1:8]:  # the last one of a layer is not rematerialized
        again = [m for m in block.members if not m.derived]
        assert len(again) == 2
        assert len(block.members) == 4
        assert ops[again[0].op].parent != ops[again[1].op].parent


# Each takes half a second and more, and others have its ops.
LARGE = (
    "diffusion haiku_stack nnx_stack lstm nnx truncated_time partitioned_kernel "
    "conditioned_layers u_net linear_recurrence vmapped_experts keys linalg "
    "graph_net int8 equinox scan_remat_policy cross_stack"
).split()


@pytest.mark.parametrize(
    "name",
    [*(one for one in programs_on(SIZES) if one not in LARGE), *at_night(LARGE)],
)
def test_every_op_has_one_place(name):
    """Blocks and updates do not overlap; what is left is scalar, or very small."""
    frame = known_frame(name)
    program = frame.program
    labelled = [op for block in frame.blocks for op in block.ops]
    assert len(labelled) == len(set(labelled))
    assert not set(labelled) & set(frame.group_of)
    rest = set(range(len(program.ops))) - set(labelled) - set(frame.group_of)
    for op_id in rest - program.leaf_ops:
        op = program.ops[op_id]
        if op.rule is not None and not passes(op):
            for result in op.results:
                elements = program.values[result].size_bytes
                assert elements < 64 * 8, (op, str(program.values[result]))


TRAINED = (
    "mlp tied_head transformer encoder_decoder grouped_query scan_mlp lstm ensemble "
    "linear_recurrence conv_net nnx equinox haiku scan_remat_policy"
).split()


@pytest.mark.parametrize(
    "name",
    [
        *(one for one in TRAINED if one not in LARGE),
        *at_night(one for one in TRAINED if one in LARGE),
    ],
)
def test_every_gradient_finds_its_block(name):
    """No contraction of the backward pass anchors a block of its own."""
    frame = known_frame(name)
    ops = frame.program.ops
    for block in frame.blocks:
        assert "transpose(" not in ops[block.anchor].scope, block
        assert len(block.members) >= 2, block


def test_noise_follows_what_it_is_added_to():
    frame = known_frame("dropout")
    assert len(frame.blocks) == 2
    program = frame.program
    bits = [op for op in program.ops if op.kind == "xor" and _rank(program, op) == 2]
    assert {frame.block_of[op.id] for op in bits} == {0}


def _rank(program, op):
    return len(program.values[op.results[0]].shape)


def test_masks_follow_what_they_mask():
    def step(w, v, x):
        lengths = jnp.argmax(x @ w, axis=1)  # from a first contraction
        y = jnp.sin(x.T @ v)
        return jnp.where(jnp.arange(32) < lengths.sum(), y, 0.0).sum()

    args = (jnp.ones((16, 4)), jnp.ones((8, 32)), jnp.ones((8, 16)))
    frame = frame_of((step, args))
    (select,) = (
        op
        for op in frame.program.ops
        if op.kind == "select" and _rank(frame.program, op) == 2
    )
    assert frame.block_of[select.id] == 1


def test_derivatives_along_each_input_follow_the_rows():
    """The first product of a Hessian has no rows, and what it is multiplied with has.

    Only the next contraction has both the rows and the inputs.
    """

    def net(p, x):
        return (jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]).sum()

    def loss(p, x):
        curvature = jax.vmap(lambda row: jax.hessian(net, 1)(p, row)[0, 0])(x)
        return (curvature**2).mean()

    p = {"a": jnp.ones((2, 16)), "b": jnp.ones((16, 16)), "c": jnp.ones((16, 1))}
    frame = frame_of((jax.grad(loss), (p, jnp.ones((48, 2)))))
    values, ops = frame.program.values, frame.program.ops
    with_rows = {
        block.index
        for block in frame.blocks
        if 48 in {d for v in ops[block.anchor].operands for d in values[v].shape}
    }
    products = [
        op
        for op in ops
        if op.kind == "multiply" and {48, 2, 16} <= {*values[op.results[0]].shape}
    ]
    assert len(products) > 4
    assert {frame.block_of[op.id] for op in products} <= with_rows


def test_parts_without_contractions_have_a_block_each():
    frame = known_frame("elementwise")
    assert [len(b.members) for b in frame.blocks] == [1, 1]
    assert len({frame.block_of[v] for v in range(len(frame.program.ops))} - {-1}) == 2


def test_tiny_things_have_none():
    assert known_frame("scalars").blocks == ()
    assert known_frame("small_integers").blocks == ()


def test_forward_passes_behind_an_update():
    """A second forward pass reads what the first backward pass made."""
    frame = known_frame("two_updates")
    assert len(frame.groups) == 4
    assert all(len(g.args) == 3 for g in frame.groups)


def test_barriers_belong_to_no_block():
    frame = known_frame("scan_remat")
    barriers = [op for op in frame.program.ops if op.kind == "optimization_barrier"]
    assert barriers
    assert all(frame.block_of[op.id] == -1 for op in barriers)


def test_names_come_from_the_users_modules():
    frame = known_frame("conv_net")
    assert [b.name for b in frame.blocks] == [
        "_ConvNet/Conv_0",
        "_ConvNet/Conv_1",
        "_ConvNet/Dense_0",
    ]


def test_a_table_that_a_contraction_made_is_no_lookup():
    def step(w, x, i):
        return (x @ w)[i]

    frame = frame_of((step, (jnp.ones((16, 8)), jnp.ones((8, 16)), jnp.arange(4))))
    assert len(frame.blocks) == 1
    looked_up = frame_of((lambda t, i: t[i] @ t.T, (jnp.ones((32, 16)), jnp.arange(8))))
    ops = looked_up.program.ops
    assert [ops[b.anchor].kind for b in looked_up.blocks] == ["gather", "dot_general"]


def test_loops_of_elementwise_ops_follow_the_block_before():
    def step(w, x):
        x = x @ w
        x = jax.lax.fori_loop(0, 4, lambda i, x: jnp.sin(x) + 1, x)
        return jnp.cos(x)

    frame = frame_of((step, (jnp.ones((16, 8)), jnp.ones((8, 16)))))
    kinds = {frame.program.ops[i].kind for i in frame.blocks[0].ops}
    assert {"sine", "cosine", "dot_general"} <= kinds


def test_products_with_what_a_loop_makes_again():
    """A random mask is made in a loop on CPUs, and so it is when it is made again."""

    def make(wrapped):
        @wrapped
        def layer(up, down, x, key):
            hidden = jnp.tanh(x @ up)
            kept = jax.random.bernoulli(key, 0.9, hidden.shape)
            return jnp.where(kept, hidden, 0) @ down

        def loss(up, down, x, key):
            return (layer(up, down, x, key) ** 2).mean()

        args = jnp.ones((8, 32)), jnp.ones((32, 8)), jnp.ones((16, 8))
        return jax.grad(loss, (0, 1)), (*args, jax.random.key(0))

    kept, again = (frame_of(make(wrapped)) for wrapped in (lambda f: f, jax.checkpoint))
    assert any(op.kind == "while" for op in again.program.ops)
    found = [
        [{m for m in block if m[2] >= 0} for block in members(frame)]
        for frame in (kept, again)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 2


@pytest.mark.parametrize("square", [jnp.vdot, lambda a, b: jnp.einsum("ij,ij->", a, b)])
def test_norms_are_sums_and_no_blocks(square):
    """A gradient's norm follows the gradient; it would be gathered for it."""

    def step_with(square):
        def step(params, x):
            def loss(params):
                return jnp.mean(jnp.tanh(x @ params["a"]) @ params["b"])

            gradients = jax.grad(loss)(params)
            norm = sum(square(g, g) for g in jax.tree.leaves(gradients))
            return jax.tree.map(lambda p, g: p - g / norm, params, gradients)

        params = {"a": jnp.ones((16, 64)), "b": jnp.ones((64, 16))}
        return step, (params, jnp.ones((32, 16)))

    found, summed = (
        members(frame_of(step_with(one)))
        for one in (square, lambda a, b: jnp.sum(a * b))
    )
    assert found == summed and len(found) == 2
