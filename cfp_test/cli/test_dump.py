"""Files that the analyze pass writes, and the formats that scripts rely on."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from rich import box

from cfp.analysis.analyze import analyze, program_flops, rematerialized_flops
from cfp.analysis.dump import (
    block_lines,
    dump_analysis,
    opaque_lines,
    plan_numbers,
    strategy_map,
)
from cfp.analysis.layout import lay_out
from cfp.analysis.presets import presets
from cfp.errors import CfpError
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.view.console import plain_text
from cfp.view.passes import analysis_data, analysis_view
from cfp_test.passes.three_passes import layout_lines, sequence_lines


def traced(fn, *args, sizes=(4,), names=("x",)):
    count = 1
    for size in sizes:
        count *= size
    mesh = planning_mesh(jax.make_mesh(sizes, names, devices=jax.devices()[:count]))
    program, lowering = trace(flatten_step(fn, args), mesh)
    return analyze(program, tuple(mesh.shape.items())), lowering


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def loss(w, x):
    with jax.named_scope("dense"):
        return jnp.tanh(x @ w).sum()


@pytest.fixture(scope="module")
def dense():
    return traced(jax.grad(loss, (0, 1)), shape(32, 64), shape(16, 32))


@pytest.mark.smoke
def test_strategies_are_written_in_letters(dense):
    analysis, _ = dense
    lines = list(strategy_map(analysis.frame, analysis.frame.blocks[0]))
    assert re.fullmatch(
        r"Instruction \d+: %dot_general\.\d+ = f32\[16,64\] dot_general\(f32\[16,32\] "
        r"%x, f32\[32,64\] %w\), lhs_contracting_dimensions = \[1\], "
        r"rhs_contracting_dimensions = \[0\]  # dense",
        lines[0],
    )
    assert lines[1:7] == [
        "Strategy SR = SR x RR @ {0}",
        "Strategy RS = RR x RS @ {0}",
        "Strategy RR = RS x SR @ {0} (allreduce @ 0)",
        "Strategy SR = RS x SR @ {0} (reducescatter @ 0)",
        "Strategy RS = RS x SR @ {0} (reducescatter @ 0)",
        "Strategy RR = RR x RR @ {}",
    ]
    assert lines[7] == ""


def test_plans_map_a_block_to_each_contraction(dense):
    """The same factor is sharded on both sides, found from the shardings alone."""
    analysis, _ = dense
    frame = analysis.frame
    (block,) = frame.blocks
    lines = list(block_lines(frame, block))
    assert lines[0] == "Parallel Block 0:"
    plans = [line for line in lines if line.startswith("    Plan: ")]
    assert plans[0] == "    Plan: 0, 1, 2, 3, 4, 5, "
    assert len(plans) == len(block.members) == 3
    listed = [
        line.removeprefix("Strategy ")
        for line in strategy_map(frame, block)
        if line.startswith("Strategy")
    ]
    own = {}
    for member in block.members:
        count = max(plan_numbers(frame, block, member)) + 1
        own[member.op], listed = listed[:count], listed[count:]
    rows, columns, contracted = [
        [own[m.op][plan_numbers(frame, block, m)[i]] for m in block.members[1:]]
        for i in range(3)
    ]
    # Rows of the data: the gradient of the weights is summed, that of the data is not.
    assert sorted("allreduce" in text for text in rows) == [False, True]
    # Columns of the weights: the other way round.
    assert [("allreduce" in text) for text in columns] == [
        "allreduce" not in text for text in rows
    ]
    # What the anchor contracts, both gradients have as a dim.
    assert not any("allreduce" in text for text in contracted)


def test_two_axes_have_two_numbers():
    sizes = {"sizes": (2, 2), "names": ("x", "y")}
    analysis, _ = traced(loss, shape(32, 64), shape(16, 32), **sizes)
    lines = list(strategy_map(analysis.frame, analysis.frame.blocks[0]))
    assert "Strategy SS = SR x RS @ {0,1}" in lines
    assert "Strategy SS = SR x RS @ {1,0}" in lines
    assert "Strategy RS = RS x SS @ {1,0} (allreduce @ 1)" in lines


def test_repeated_segments_map_to_the_first():
    def deep(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w["up"]) @ w["down"]
        return (x**2).sum()

    layer = {"up": shape(32, 64), "down": shape(64, 32)}
    analysis, _ = traced(jax.grad(deep, (0, 1)), [layer] * 3, shape(16, 32))
    assert list(sequence_lines(analysis)) == [
        "ParallelBlocks sequence: (0, 2) mapped to  (0, 2)",
        "ParallelBlocks sequence: (2, 4) mapped to  (0, 2)",
        "ParallelBlocks sequence: (4, 6) mapped to  (0, 2)",
    ]


def test_all_files_are_written(dense, tmp_path):
    analysis, lowering = dense
    files = dump_analysis(tmp_path / "made" / "here", analysis, lowering.text)
    texts = {path.name: path.read_text() for path in files}
    assert texts["program.mlir"].startswith("module @jit_loss")
    assert "Instruction" in texts["strategy_map.txt"]
    assert "Parallel Block 0:" in texts["parallel_blocks.txt"]
    (segment,) = json.loads(texts["segments.json"])
    assert segment["blocks"] == [0, 1]
    assert segment["names"] == ["dense"]
    assert segment["strategies"] == [6]
    assert texts["opaque_ops.txt"].startswith("0 ops")


def test_a_folder_that_cannot_be_written_is_explained(dense, tmp_path):
    (tmp_path / "file").write_text("")
    analysis, lowering = dense
    with pytest.raises(CfpError, match="Cannot write to"):
        dump_analysis(tmp_path / "file", analysis, lowering.text)


def test_opaque_ops_are_listed_with_their_source():
    def on_the_host(x):
        return jax.pure_callback(lambda x: x, shape(16, 16), x @ x).sum()

    analysis, _ = traced(on_the_host, shape(16, 16))
    lines = list(opaque_lines(analysis.frame.program))
    assert not lines[0].startswith("0 ops")
    assert any("custom_call" in line and "test_dump.py:" in line for line in lines)
    view = analysis_view(analysis_data(analysis, 0.0), box.ASCII)
    assert lines[0] in plain_text(view)


def test_a_region_sharded_by_hand_is_not_listed_as_opaque():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": P("x"), "out_specs": P("x")}
    doubled = jax.shard_map(lambda x: x + x, mesh=mesh, **specs)
    analysis, _ = traced(doubled, shape(16, 16))
    assert [*opaque_lines(analysis.frame.program)] == [
        "0 ops without a sharding rule, run replicated"
    ]


def test_a_layout_names_every_ops_sharding(dense):
    analysis, _ = dense
    layout = lay_out(analysis.frame, presets(analysis.frame)["data_parallel"])
    lines = list(layout_lines(layout))
    assert len(lines) == len(analysis.frame.program.ops)
    assert any("tanh" in line and line.endswith("sharding=[x, -]") for line in lines)


@pytest.mark.parametrize(
    ("fn", "args", "flops"),
    [
        (lambda x, w: x @ w, [(8, 16), (16, 32)], 2 * 8 * 16 * 32),
        (
            lambda x, w: jnp.einsum("bij,bjk->bik", x, w),
            [(4, 8, 16), (4, 16, 8)],
            2 * 4 * 8 * 16 * 8,
        ),
        (
            lambda x, w: (jax.lax.complex(x, x) @ jax.lax.complex(w, w)).real,
            [(8, 16), (16, 32)],
            4 * 2 * 8 * 16 * 32,
        ),
        (
            lambda x, ws: jax.lax.scan(lambda c, w: (c @ w, None), x, ws)[0],
            [(8, 16), (5, 16, 16)],
            5 * 2 * 8 * 16 * 16,
        ),
        (
            lambda x, k: jax.lax.conv_general_dilated(
                x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            [(2, 16, 16, 4), (3, 3, 4, 8)],
            2 * (2 * 8 * 8 * 8) * 3 * 3 * 4,
        ),
        (
            lambda x, k: jax.lax.conv_general_dilated(
                *(x, k, (1, 1), "SAME"),
                feature_group_count=4,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            ),
            [(2, 16, 16, 8), (3, 3, 2, 8)],
            2 * (2 * 16 * 16 * 8) * 3 * 3 * 2,
        ),
        (lambda x: jnp.tanh(x).sum(), [(8, 16)], 0),
    ],
)
def test_flops_are_counted(fn, args, flops):
    analysis, _ = traced(fn, *(shape(*dims) for dims in args))
    assert program_flops(analysis.frame.program) == flops


def test_gradients_of_convolutions_count_like_the_convolution():
    def squared(x, k):
        y = jax.lax.conv_general_dilated(
            x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (y**2).sum()

    args = (shape(2, 16, 16, 4), shape(3, 3, 4, 8))
    once, _ = traced(squared, *args)
    whole, _ = traced(jax.grad(squared, (0, 1)), *args)
    flops = program_flops(once.frame.program)
    assert program_flops(whole.frame.program) == 3 * flops


@pytest.mark.parametrize("scanned", [False, True])
def test_flops_of_what_a_checkpoint_rematerializes_are_counted_apart(scanned):
    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w.T)

    def stack(x, ws, layer):
        if scanned:
            return jax.lax.scan(lambda c, w: (layer(c, w), None), x, ws)[0].sum()
        for w in ws:
            x = layer(x, w)
        return x.sum()

    def both(layer):
        analysis, _ = traced(
            jax.grad(lambda x, ws: stack(x, ws, layer), (0, 1)),
            *(shape(8, 16), shape(3, 16, 32)),
        )
        frame = analysis.frame
        again = rematerialized_flops(frame.program, frame.blocks)
        return program_flops(frame.program), again

    product = 2 * 8 * 16 * 32
    plain, none = both(layer)
    whole, again = both(jax.checkpoint(layer))
    assert (plain, none) == (3 * 6 * product, 0)
    # The last product of a layer is not needed again: only what follows from it is.
    assert again > 0 and whole - again == plain
