import textwrap
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from cfp.profiling.hlo import collectives_in
from cfp.profiling.record import Collective

P = PartitionSpec


def one(line: str) -> tuple[str, int, int, int]:
    """(kind, bytes, group size, count) of the only collective."""
    [found] = collectives_in(line)
    return found.kind, found.bytes, found.group_size, found.count


# ------------------------------------------------------------------------ single lines


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # As the CPU compiler writes them.
        (
            "  ROOT %all-reduce = f32[64,64]{1,0} all-reduce(%ynn_fusion), "
            "channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), "
            "use_global_device_ids=true, to_apply=%add.clone",
            ("all-reduce", 16384, 4, 1),
        ),
        (
            "  %all-gather = f32[64,64]{1,0} all-gather(%x), channel_id=1, "
            "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}, "
            "dimensions={0}, use_global_device_ids=true",
            ("all-gather", 16384, 4, 1),
        ),
        (
            "  %all-gather = f32[8,64]{0,1} all-gather(%x), channel_id=2, "
            "replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) "
            "{'axis_1'}, dimensions={1}",
            ("all-gather", 2048, 4, 1),
        ),
        (
            "  %all-reduce = f32[4]{0} all-reduce(%x), "
            "replica_groups=mesh['x'=4,'y'=2] {'x','y'}, to_apply=%add",
            ("all-reduce", 16, 8, 1),
        ),
        (
            "  %all-reduce = f32[4]{0} all-reduce(%x), "
            "replica_groups=mesh['x'=8,'y'=3] {'x':(2)4,'y'}, to_apply=%add",
            ("all-reduce", 16, 12, 1),
        ),
        (
            "  ROOT %reduce_scatter.7 = f32[4,64]{1,0} reduce-scatter(%param.1), "
            "channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, "
            "to_apply=%region_0.0",
            ("reduce-scatter", 4096, 4, 1),
        ),
        (
            "  %all-to-all.1 = (f32[16,1]{1,0}, f32[16,1]{1,0}, /*index=2*/"
            "f32[16,1]{1,0}, f32[16,1]{1,0}) all-to-all(%a, %b, %c, %d), "
            "replica_groups={{0,1,2,3}}",
            ("all-to-all", 256, 4, 1),
        ),
        (
            "  %collective-permute = f32[1,64]{1,0} collective-permute(%s), "
            "channel_id=1, source_target_pairs="
            "{{0,2},{1,3},{2,4},{3,5},{4,6},{5,7},{6,0},{7,1}}",
            ("collective-permute", 256, 4, 1),
        ),
        # As the GPU compiler writes them.
        (
            "  %all-reduce-start.1 = bf16[1024,8]{1,0} all-reduce-start(%fusion.3), "
            "channel_id=7, replica_groups=[1,8]<=[8], use_global_device_ids=true, "
            'to_apply=%add, backend_config={"operation_queue_id":"0",'
            '"collective_backend_config":{"is_sync":false},"force_earliest_schedule"'
            ":false}",
            ("all-reduce", 16384, 8, 1),
        ),
        (
            "  %all-reduce-start = (f32[10]{0}, f32[20]{0}, f32[30]{0}) "
            "all-reduce-start(%a, %b, %c), replica_groups={{0,1}}, to_apply=%add",
            ("all-reduce", 240, 2, 1),
        ),
        (
            "  %all-gather-start = (bf16[8]{0}, bf16[32]{0}) all-gather-start(%p), "
            "channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}",
            ("all-gather", 64, 4, 1),
        ),
        (
            "  %all-gather-start.2 = ((f32[8]{0}, bf16[4]{0}), (f32[32]{0}, "
            "bf16[16]{0})) all-gather-start(%p, %q), replica_groups={{0,1,2,3}}, "
            "dimensions={0}",
            ("all-gather", 160, 4, 1),
        ),
        (
            "  %reduce-scatter-start = ((f32[1024,2048]{1,0}), f32[128,2048]{1,0}) "
            "reduce-scatter-start(%p2), channel_id=8, "
            "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%region",
            ("reduce-scatter", 8388608, 8, 1),
        ),
        (
            "  %all-to-all-start = ((f32[4,8]{1,0}), f32[4,8]{1,0}, u32[], u32[]) "
            "all-to-all-start(%x), replica_groups={{0,1},{2,3}}, dimensions={0}",
            ("all-to-all", 128, 2, 1),
        ),
        (
            "  %cp = (f32[8]{0}, f32[8]{0}, u32[], u32[]) "
            "collective-permute-start(%x), channel_id=1, "
            "source_target_pairs={{0,1},{1,0},{2,3},{3,2}}",
            ("collective-permute", 32, 2, 1),
        ),
        (
            "  %all-reduce-start = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%x), "
            'async_execution_thread="parallel", replica_groups={{0,1}}, to_apply=%a',
            ("all-reduce", 32, 2, 1),
        ),
        # Layouts with tiles and memory spaces, and types of all widths.
        (
            "  %ar = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x), "
            "replica_groups={{0,1}}, to_apply=%add",
            ("all-reduce", 2048, 2, 1),
        ),
        ("  %a = pred[8]{0} all-gather(%x), replica_groups={{0,1}}", None),
        ("  %a = s4[9]{0} all-gather(%x), replica_groups={{0,1}}", 5),
        ("  %a = f8e4m3fn[8]{0} all-gather(%x), replica_groups={{0,1}}", None),
        ("  %a = c64[8]{0} all-gather(%x), replica_groups={{0,1}}", 64),
        ("  %a = f64[] all-gather(%x), replica_groups={{0,1}}", 8),
        ("  %a = u32[0,4]{1,0} all-gather(%x), replica_groups={{0,1}}", 0),
        ("  %a = f32[<=4]{0} all-gather(%x), replica_groups={{0,1}}", 16),
    ],
)
def test_one_line(line, expected):
    if not isinstance(expected, tuple):
        expected = ("all-gather", 8 if expected is None else expected, 2, 1)
    assert one(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "  %d = bf16[1024]{0} all-reduce-done(%all-reduce-start.1)",
        "  %d = f32[2]{0} reduce-scatter-done(%s)",
        "  %u = ((f32[20]{0}), f32[10]{0}) reduce-scatter-update(%s)",
        "  %all-reduce.3 = f32[4]{0} add(%all-reduce.1, %all-reduce.2)",
        '  %f = f32[4]{0} fusion(%x), kind=kLoop, calls=%f, metadata={op_name="a '
        '= f32[4] all-gather(x)"}',
        "  %t = (f32[4]{0}, f32[4]{0}) tuple(%all-gather, %all-gather)",
    ],
)
def test_lines_that_only_mention_a_collective(line):
    assert collectives_in(line) == ()


# --------------------------------------------------------------------- whole modules


def test_empty_groups_mean_all_devices():
    text = textwrap.dedent("""\
        HloModule m, is_scheduled=true, replica_count=2, num_partitions=4

        ENTRY %main (p: f32[4]) -> f32[4] {
          %p = f32[4]{0} parameter(0)
          ROOT %r = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add
        }
        """)
    assert one(text) == ("all-reduce", 16, 8, 1)


LOOPS = textwrap.dedent("""\
    HloModule jit_step, is_scheduled=true, num_partitions=4

    %add (x: f32[], y: f32[]) -> f32[] {
      %x = f32[] parameter(0)
      %y = f32[] parameter(1)
      ROOT %s = f32[] add(%x, %y)
    }

    %async_computation (q: f32[8]) -> f32[8] {
      %q = f32[8]{0} parameter(0)
      ROOT %a2a = f32[8]{0} all-to-all(%q), replica_groups={{0,1,2,3}}, dimensions={0}
    }

    %inner_body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
      %g = f32[8]{0} get-tuple-element(%t), index=1
      %all-reduce.1 = f32[8]{0} all-reduce(%g), replica_groups={{0,1}}, to_apply=%add
      ROOT %out = (s32[], f32[8]) tuple(%i, %all-reduce.1)
    }

    %outer_body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
      %w = (s32[], f32[8]) while(%t), condition=%cond, body=%inner_body, INNER
      %f = f32[8]{0} fusion(%g), kind=kLoop, calls=%add
      %s = ((f32[8]{0}), f32[8]{0}) async-start(%f), calls=%async_computation
      %d = f32[8]{0} async-done(%s)
      ROOT %out = (s32[], f32[8]) tuple(%i, %d)
    }

    %cond (t: (s32[], f32[8])) -> pred[] {
      ROOT %lt = pred[] compare(%i, %n), direction=LT
    }

    %command_buffer (p: f32[8]) -> f32[32] {
      ROOT %ag = f32[32]{0} all-gather(%p), replica_groups=[1,4]<=[4], dimensions={0}
    }

    %branch_0 (p: f32[8]) -> f32[8] {
      ROOT %r0 = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
    }

    %branch_1 (p: f32[8]) -> f32[8] {
      ROOT %r1 = f32[8]{0} copy(%p)
    }

    ENTRY %main (p: f32[8]) -> f32[8] {
      %p = f32[8]{0} parameter(0)
      %call = f32[32]{0} call(%p), to_apply=%command_buffer
      %w = (s32[], f32[8]) while(%t), condition=%cond, body=%outer_body, OUTER
      %c = f32[8]{0} conditional(%b, %p, %p), branch_computations={%branch_0, %branch_1}
      ROOT %r = f32[8]{0} get-tuple-element(%w), index=1
    }
    """)


def test_loops_multiply_and_calls_add():
    text = LOOPS.replace(
        "INNER", 'backend_config={"known_trip_count":{"n":"3"},"known_init_step":{}}'
    ).replace(
        # As it was written when the whole configuration was a string.
        "OUTER",
        'backend_config="{\\"known_trip_count\\":{\\"n\\":\\"5\\"}}"',
    )
    assert collectives_in(text) == (
        Collective(kind="all-reduce", bytes=32, group_size=2, count=15),
        Collective(kind="all-to-all", bytes=32, group_size=4, count=5),
        Collective(kind="all-gather", bytes=128, group_size=4, count=1),
        Collective(kind="collective-permute", bytes=32, group_size=2, count=1),
    )


def test_a_loop_of_unknown_length_counts_once():
    text = LOOPS.replace("INNER", 'metadata={op_name="while"}').replace("OUTER", "")
    counts = {c.kind: c.count for c in collectives_in(text)}
    assert counts == {
        "all-reduce": 1,
        "all-to-all": 1,
        "all-gather": 1,
        "collective-permute": 1,
    }


def test_several_modules_do_not_mix():
    module = (
        "HloModule {0}, num_partitions={1}\n\n"
        "ENTRY %main (p: f32[8]) -> f32[8] {{\n"
        "  ROOT %r = f32[8]{{0}} all-reduce(%p), replica_groups={{}}, to_apply=%a\n"
        "}}\n"
    )
    text = module.format("one", 2) + "\n" + module.format("two", 4)
    assert {(c.group_size, c.count) for c in collectives_in(text)} == {(2, 1), (4, 1)}


def test_text_without_programs():
    assert collectives_in("") == ()
    assert collectives_in("no HLO at all = {\n}") == ()


# ------------------------------------------------- what this version's compiler writes


def compiled(function, mesh, in_specs, out_spec, *shapes):
    jitted = jax.jit(
        function,
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in in_specs),
        out_shardings=NamedSharding(mesh, out_spec),
    )
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jitted.lower(*avals).compile().as_text()
    return {(c.kind, c.bytes, c.group_size, c.count) for c in collectives_in(text)}


@pytest.fixture(scope="module")
def mesh():
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=auto)


@pytest.mark.parametrize(
    ("axes", "group"), [("x", 4), ("y", 2), (("x", "y"), 8), (("y", "x"), 8)]
)
def test_all_reduce_of_a_contraction(mesh, axes, group):
    found = compiled(
        jnp.matmul, mesh, [P(None, axes), P(axes)], P(), (64, 32), (32, 64)
    )
    assert found == {("all-reduce", 64 * 64 * 4, group, 1)}


@pytest.mark.parametrize(("axes", "group"), [("x", 4), ("y", 2), (("x", "y"), 8)])
def test_all_gather(mesh, axes, group):
    found = compiled(jnp.negative, mesh, [P(axes)], P(), (64, 64))
    assert found == {("all-gather", 64 * 64 * 4, group, 1)}


def test_all_to_all(mesh):
    found = compiled(jnp.negative, mesh, [P("x")], P(None, "x"), (64, 64))
    assert found == {("all-to-all", 64 * 64 * 4 // 4, 4, 1)}


def test_collective_permute(mesh):
    roll = partial(jnp.roll, shift=1, axis=0)
    found = compiled(roll, mesh, [P("x")], P("x"), (64, 64))
    assert found == {("collective-permute", 64 * 4, 4, 1)}


@pytest.mark.parametrize(("axis", "group"), [("x", 4), ("y", 2)])
def test_reduce_scatter(mesh, axis, group):
    scatter = jax.shard_map(
        partial(lax.psum_scatter, axis_name=axis, tiled=True),
        mesh=mesh,
        in_specs=P(axis),
        out_specs=P(axis),
    )
    found = compiled(scatter, mesh, [P(axis)], P(axis), (64, 64))
    assert found == {("reduce-scatter", 64 * 64 * 4 // group, group, 1)}


def test_a_scan_counts_its_trips(mesh):
    def function(x, weights):
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0]

    found = compiled(
        function, mesh, [P("y"), P(None, "x")], P("y"), (16, 64), (5, 64, 64)
    )
    reduced = {item for item in found if item[0] == "all-reduce"}
    assert reduced == {("all-reduce", 8 * 64 * 4, 4, 5)}
