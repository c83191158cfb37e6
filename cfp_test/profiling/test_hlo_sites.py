"""Collectives with the lines that they come from."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cfp.profiling.hlo import CollectiveSite, collective_sites, collectives_in
from cfp.report.passes import ops_text, sites_text
from cfp_test.profiling.hlo_of_versions import OLD
from cfp_test.support.checking import make_mesh

NEW = """HloModule jit_f, num_partitions=2

FileNames
1 "/home/me/run.py"
2 "/env/lib/site-packages/nets/dense.py"
3 "/home/me/model.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=8 end_line=8 column=2 end_column=2}
2 {file_name_id=3 function_name_id=1 line=20 end_line=20 column=2 end_column=2}
3 {file_name_id=2 function_name_id=1 line=5 end_line=5 column=2 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %ar = f32[8]{0} all-reduce(%a), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(f)/dense/dot" stack_frame_id=3}
}
"""  # noqa: E501


def test_places_are_read_in_the_older_form():
    assert collective_sites(OLD) == (
        CollectiveSite(
            kind="all-reduce",
            bytes=32,
            group_size=2,
            count=5,
            scope='jit(f)/while/body/"odd" name',
            source="/home/me/net work.py:7",
        ),
        CollectiveSite(
            kind="all-gather",
            bytes=128,
            group_size=4,
            count=1,
            scope="jit(f)/neg",
            source="/home/me/a.py:3",
        ),
    )


def test_places_are_read_in_the_newer_form_and_the_users_own_file_is_named():
    [site] = collective_sites(NEW)
    assert (site.source, site.scope) == ("/home/me/model.py:20", "jit(f)/dense/dot")


def test_parents_may_be_counted_from_nothing_too():
    """XLA counts from 1 up, where 1 is none: the first frame is its own parent."""
    text = NEW
    for parent in (1, 2, 3):
        now, then = (f"parent_frame_id={n}}}" for n in (parent, parent - 1))
        text = text.replace(now, then)
    [site] = collective_sites(text)
    assert site.source == "/home/me/model.py:20"


def test_a_compiled_step_tells_its_lines():
    mesh = make_mesh((("x", 4),))
    rows = NamedSharding(mesh, P("x"))

    def step(w, x):
        with jax.named_scope("dense"):
            y = x @ w
        return y.sum()  # the line that sums over devices

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    compiled = jax.jit(step, in_shardings=(rows, rows)).lower(shape, shape).compile()
    text = compiled.as_text() or ""
    sites = collective_sites(text)
    first = step.__code__.co_firstlineno
    lines = {s.kind: int(s.source.rpartition(":")[2]) - first for s in sites}
    assert lines == {"all-gather": 2, "all-reduce": 3}
    assert all(__file__ in site.source for site in sites)
    total = sum(s.bytes * s.count for s in sites)
    assert total == sum(c.bytes * c.count for c in collectives_in(text))
    table = sites_text(sites)
    assert max(map(len, table.splitlines())) <= 100
    assert "profiling/test_hlo_sites.py" in table.replace("\n", "")


def test_a_program_without_collectives_says_so():
    assert sites_text(()) == "The program has no collectives.\n"


@pytest.mark.parametrize(
    ("scope", "short"),
    [
        ("jit(step)/layer/dot", "layer/dot"),
        ("jit(step)/(a/dot:b/dot:c/dot)", "a/dot, b/dot, c/dot"),
        ("jit(step)/(a/dot:b/dot:c/dot:d/dot)", "a/dot, b/dot, c/dot and 1 more"),
        ("jit(step)/transpose(jvp(Net))/L_3/dot", "Net/L_3/dot (backward)"),
        ("jit(step)/(jvp(Net)/L_0/dot:jvp(Net)/L_1/dot)", "Net/L_0-1/dot"),
        (
            "jit(step)/while/body/(jvp()/sum:transpose(jvp(Net))/a/dot)",
            "sum, Net/a/dot (backward)",
        ),
        ("", ""),
        ("(alone)", "(alone)"),
    ],
)
def test_scopes_are_shortened(scope, short):
    assert ops_text([scope]) == short


def test_names_that_are_elided_alike_count_as_more():
    wide = "x" * 100
    scopes = [f"jit(step)/{wide}{middle}{wide}/dot" for middle in "abcde"]
    assert ops_text(scopes).endswith("xxx/dot and 4 more")
    assert ops_text(scopes[:2]).endswith("xxx/dot and 1 more")


def test_combined_collectives_say_so_and_long_names_keep_their_ends():
    path = "/".join(f"module_{i}" for i in range(40))
    scope = f"jit(step)/(transpose(jvp({path}))/dot:transpose(jvp(Net))/last/add)"
    site = CollectiveSite(
        kind="all-reduce", bytes=8, group_size=4, count=1, scope=scope, source="a.py:1"
    )
    table = sites_text([site])
    assert max(map(len, table.splitlines())) <= 100
    cells = [line.split("|")[-2].strip() for line in table.splitlines() if "|" in line]
    shown = " ".join(cells)
    assert "2 ops combined: module_0/module_1/" in shown
    assert "module_20" not in shown and "module_39/dot (backward)" in shown
    assert "Net/last/add (backward)" in shown


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(12):
            x = nn.Dense(8)(x)  # the line of all twelve
        return x


def test_layers_stand_in_one_row_with_the_users_line_though_a_library_computes(
    monkeypatch,
):
    monkeypatch.setenv("COLUMNS", "160")
    mesh = make_mesh((("x", 4),))
    model, x = Layers(), jnp.ones((8, 8))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), x))
    cut = NamedSharding(mesh, P("x"))
    where = jax.tree.map(lambda leaf: cut, params)
    text = jax.jit(model.apply, in_shardings=(where, cut)).lower(params, x)
    sites = collective_sites(text.compile().as_text() or "")
    line = inspect.getsourcelines(Layers)[1] + 4
    assert {site.source for site in sites} == {f"{__file__}:{line}"}
    rows = [text for text in sites_text(sites).splitlines() if "all-gather" in text]
    assert sum(site.count for site in sites) == 24
    assert [[cell.strip() for cell in row.split("|")[2:4]] for row in rows] == [
        ["12", "256 B"],
        ["12", "32 B"],
    ]
    assert "Layers/Dense_0-11/dot_general|" in rows[0]
