"""Clusters that are described: what is read, priced and refused."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib import resources
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import cfp
from cfp.cost.described import _memory_bytes, cluster_of, description_of, kind, kinds
from cfp.errors import CfpError
from cfp.passes import outer_axes
from cfp.profiling.collectives import Rates, sent_share

_WANTED = ("a100", "h100", "h200", "b200", "l40s", "v5e", "v5p", "v6e")


def _files():
    folder = resources.files("cfp.cost").joinpath("kinds")
    return [file for file in folder.iterdir() if file.name.endswith(".toml")]


def test_every_number_says_its_source_and_its_basis():
    assert {kind(name).name for name in _WANTED} <= {f.name[:-5] for f in _files()}
    for file in _files():
        data = tomllib.loads(file.read_text())
        numbers = [v for v in data.values() if isinstance(v, dict) and "value" in v]
        numbers += data.get("measured", {}).values()
        assert len(numbers) >= 5, file.name
        for one in numbers:
            assert (
                one["basis"] in ("measured", "specified") and len(one["source"]) > 5
            ), (file.name, one)


def test_h200_is_what_was_measured_and_others_reach_the_same_share():
    h200, h100 = kind("h200"), kind("h100")
    assert h200.expected("bfloat16_tflop_per_s") == pytest.approx(690.9)
    assert h100.expected("memory_gb_per_s") == pytest.approx(3350 * 4118 / 4800)


@pytest.mark.parametrize(
    ("text", "hosts", "per_host"), [("4xh200", 1, 4), ("2x8xH100", 2, 8)]
)
def test_short_descriptions(text, hosts, per_host):
    found = cluster_of(text)
    assert (found.hosts, found.per_host, found.count) == (
        hosts,
        per_host,
        hosts * per_host,
    )


@pytest.mark.parametrize(
    ("text", "torus"),
    [("v5e-8", (2, 4)), ("V6E-32", (4, 8)), ("v5litepod-256", (16, 16))],
)
def test_a_slice_goes_by_its_number_of_chips_too(text, torus):
    found = cluster_of(text)
    assert (found.torus, found.count) == (torus, torus[0] * torus[1])


@pytest.mark.parametrize("text", ["v5e-7", "v6e-12"])
def test_a_slice_has_a_power_of_two_of_chips(text):
    with pytest.raises(CfpError, match=f"{text}' cannot be read"):
        cluster_of(text)


def test_a_file_with_hosts_alone_has_as_many_devices_in_each_as_the_kind(tmp_path):
    file = tmp_path / "four.toml"
    file.write_text('kind = "h200"\nhosts = 4\n')
    assert cfp.described(str(file)).axes == (("x", 4), ("y", 8))
    with pytest.raises(CfpError, match=r"hosts = 4, devices_per_host = 8"):
        cfp.described(str(file), x=4)


def test_inside_a_host_curves_are_the_measured_ones_by_what_is_sent():
    found = cfp.described("4xh200").rates
    two = kind("h200").link_times[1]["all-gather"]
    size, ms = two[-1]
    more = sent_share("all-gather", 4) / sent_share("all-gather", 2)
    floor = two[0][1]
    expected = floor + (ms - floor) * more
    assert found.collective_ms("all-gather", ("x",), size) == pytest.approx(expected)


def test_axes_that_cross_hosts_are_priced_with_the_network():
    mesh = cfp.described("2x8xh100", x=2, y=8)
    assert mesh.crossing == ("x",)
    size = 1 << 28
    rates = mesh.rates
    for what in ("all-reduce", "all-gather", "all-to-all"):
        across = rates.collective_ms(what, ("x",), size)
        within = cfp.described("2xh100").rates.collective_ms(what, ("x",), size)
        # An adapter sends a ninth of what NVLink does.
        assert 5 < across / within < 12, what
    # All of a host's adapters carry what all of its devices send together.
    both = rates.collective_ms("all-reduce", ("x", "y"), size)
    assert both < 0.5 * rates.collective_ms("all-reduce", ("x",), size)
    turned = cfp.described("2x8xh100", x=8, y=2)
    assert turned.crossing == ("x",)


@pytest.mark.parametrize(
    ("text", "axes", "outer"),
    [
        ("8x8xh100", {"x": 8, "y": 8}, "x"),
        ("8x8xh100", {"x": 2, "y": 4, "z": 8}, "xy"),
        ("2x8xh100", {"x": 1, "y": 2, "z": 8}, "y"),
        ("8xh100", {"x": 2, "y": 4}, ""),
        # Of the groups along y, only the second crosses.
        ("2x6xh100", {"x": 3, "y": 4}, "xy"),
        # Of a slice of several hosts the first: its links are all alike.
        ("v5e:16x16", {"x": 16, "y": 16}, "x"),
        ("v6e:4x4", {"x": 4, "y": 4}, "x"),
        ("v5e:2x4", {"x": 2, "y": 4}, ""),
    ],
)
def test_outer_axes_are_those_from_host_to_host(text, axes, outer):
    mesh = cfp.described(text, **axes)
    assert mesh.outer == outer_axes(mesh) == {*outer}


def test_slower_links_and_less_memory_are_those_of_the_kind():
    fast, slow = cfp.described("4xa100"), cfp.described("4xa100-40gb-pcie")
    size = 1 << 28
    times = [m.rates.collective_ms("all-reduce", ("x",), size) for m in (fast, slow)]
    assert times[1] / times[0] == pytest.approx(300 / 32, rel=0.05)
    assert slow.memory_bytes * 2 == fast.memory_bytes


def test_own_numbers_of_a_file_count(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(
        'kind = "l40s"\nhosts = 2\ndevices_per_host = 4\nnetwork_gb_per_s = 25\n'
        'memory_gb_per_s = { value = 700, basis = "measured", source = "our own" }\n'
    )
    mesh = cfp.described(str(file), x=2, y=4)
    assert mesh.rates.memory_bytes_per_ms == pytest.approx(700e6)
    assert mesh.environment["device_kind"] == "NVIDIA L40S"
    assert mesh.crossing == ("x",)


def test_a_file_of_an_own_kind_is_told_its_missing_network(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        "hosts = 2\ndevices_per_host = 4\nmemory_gib = 80\nlink_gb_per_s = 300\n"
        "bfloat16_tflop_per_s = 900\nfloat32_tflop_per_s = 400\nmemory_gb_per_s = 3e3\n"
    )
    with pytest.raises(CfpError, match=r"mine is unknown\. Add network_gb_per_s"):
        cfp.described(str(file))


def test_what_is_exported_can_be_planned_for(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    rates = replace(Rates.default(mesh), memory_bytes_per_ms=5e6)
    file = tmp_path / "mine.toml"
    file.write_text(description_of(mesh, rates))
    found = cfp.described(str(file), x=4)
    assert found.rates.memory_bytes_per_ms == pytest.approx(5e6)
    for what in ("all-reduce", "all-to-all"):
        expected = rates.collective_ms(what, ("x",), 1 << 24)
        assert found.rates.collective_ms(what, ("x",), 1 << 24) == pytest.approx(
            expected
        )


@pytest.mark.parametrize(
    ("text", "axes", "error", "named"),
    [
        ("4xh300", {}, CfpError, ("h300", "h200")),
        ("four h200", {}, CfpError, ("four h200", "4xh200")),
        ("missing.toml", {}, CfpError, ("missing.toml",)),
        ("0xh200", {}, CfpError, ("0xh200",)),
        ("4xh200", {"x": 3}, CfpError, ("x=3", "x=4")),
        ("2x4xl40s", {}, CfpError, ("l40s", "network_gb_per_s")),
        ("64xh100", {}, CfpError, (" 8 ", "8x8xh100")),
        ("12xh100", {}, CfpError, ("2x6xh100",)),
        ("13xh100", {}, CfpError, ("13x1xh100",)),
        ("2x16xa100", {}, CfpError, ("4x8xa100",)),
        ("16xv5e", {}, CfpError, ("v5e:4x4",)),
        ("v5p:4x4", {}, CfpError, ("v5p:2x2x4",)),
        ("h100:2x2", {}, CfpError, ("8xh100",)),
        ("v6e:4x4", {"x": 2, "y": 8}, CfpError, ("x=2 x y=8", "x=16", "make_mesh")),
        ("v5p-8", {}, CfpError, ("v5p:2x2x4",)),
    ],
)
def test_bad_descriptions_name_what_came_and_what_to_give(text, axes, error, named):
    with pytest.raises(error) as caught:
        cfp.described(text, **axes)
    message = str(caught.value)
    assert "\n" not in message and [n for n in named if n not in message] == []


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("memory_gib = 40\n", ("bfloat16_tflop_per_s",)),
        ('kind = "h200"\nbfloat16_tflop_per_s = -1\n', ("bfloat16_tflop_per_s", "-1")),
        (
            'kind = "h200"\nmemory_gib = { value = 1, basis = "guessed" }\n',
            ("memory_gib.basis", "guessed"),
        ),
        ('kind = "h200"\ndevices_per_host = 2.5\n', ("devices_per_host", "2.5")),
        ('kind = "h200"\n[curves]\nall-gather = [[1, 0.0]]\n', ("curves.all-",)),
        ('kind = "h200"\nmemory_gib = true\n', ("memory_gib.value", "True")),
        ("kind = \n", ("TOMLDecodeError",)),
        ('kind = "h200"\nmemory_gb = 40\n', ("40: unknown name", "memory_gib")),
        ('kind = "h200"\nhosts = 10000000\n', ("hosts", "10000000")),
        ('kind = "h300"\n', ("h300", "h200")),
        ("kind = 200\n", ("kind of device '200'", "h200")),
    ],
)
def test_bad_files_name_the_field_and_its_value(tmp_path, content, named):
    file = tmp_path / "cluster.toml"
    file.write_text(content)
    with pytest.raises(CfpError) as caught:
        cfp.described(str(file))
    assert [name for name in named if name not in str(caught.value)] == []


def test_a_file_describes_larger_hosts(tmp_path):
    file = tmp_path / "large.toml"
    file.write_text('kind = "a100"\ndevices_per_host = 16\n')
    assert cfp.described(str(file)).axes == (("x", 16),)


# ------------------------------------------------------------------------------ slices


def test_slices_are_laid_out_as_jax_does():
    slice_ = cluster_of("v5p:2x2x4")
    places = slice_.places((("x", 4), ("y", 4)))
    assert {tuple(one) for one in places[:, 0]} == {(0, 0, z) for z in range(4)}
    assert slice_.places((("x", 16),)).shape == (16, 3)
    assert cluster_of("v6e:4x4").places((("x", 2), ("y", 8))) is None
    # Of a v5e make_mesh splits a dim: y has all of one, and half of the other.
    split = cluster_of("v5e:4x4").places((("x", 2), ("y", 8)))
    assert split is not None
    assert (np.ptp(split[0], axis=0) + 1).tolist() == [4, 2, 1]
    blocks = cluster_of("v5e:2x4").places((("x", 2), ("y", 4)))
    assert blocks is not None
    assert [(np.ptp(one, axis=0) + 1).tolist() for one in blocks] == [[2, 2, 1]] * 2


def test_an_axis_that_splits_a_dim_is_no_faster_than_a_whole_one():
    whole = _ms("v5e:4x4", "all-gather", "y", x=4, y=4)
    split = {name: _ms("v5e:4x4", "all-gather", name, x=2, y=8) for name in "xy"}
    assert split["x"] >= 0.9 * whole * 2 / 3  # half of it, by 2/3 of a link
    assert split["y"] > 0.5 * whole


def test_dims_of_a_slice_close_to_rings_where_it_is_made_of_whole_ones():
    rings = {text: cluster_of(text).rings for text in ("v5e:8x16", "v5p:2x2x4")}
    assert rings == {"v5e:8x16": (False, True), "v5p:2x2x4": (False,) * 3}
    assert all(cluster_of("v5p:4x4x8").rings)


def _ms(text: str, what: str, *names: str, size: int = 1 << 30, **axes: int) -> float:
    return cfp.described(text, **axes).rates.collective_ms(what, names, size)


def test_collectives_on_a_torus_take_what_its_links_take():
    """Times of large ones, by hand: bytes that a link sends, at 50 or 100 GB/s."""
    size, near = 1 << 30, 0.01
    # Along a line of four a device at its end gets three quarters by one link.
    line = _ms("v5e:4x4", "all-gather", "y", x=4, y=4)
    assert line == pytest.approx(0.75 * size / 50e6, rel=near)
    # A ring of 16 has two links at each device; both dims have four.
    ring = _ms("v5e:16x16", "all-gather", "y", x=16, y=16)
    assert ring == pytest.approx(15 / 16 * size / 100e6, rel=near)
    both = _ms("v5e:16x16", "all-reduce", "x", x=256)
    assert both == pytest.approx(2 * 255 / 256 * size / 200e6, rel=near)
    # Halves of a ring of 16 exchange a quarter each way, by two links.
    halves = _ms("v5e:16x16", "all-to-all", "y", x=16, y=16)
    assert halves == pytest.approx(size / 4 / 100e6, rel=near)
    # Each of the 16 lines of a square crosses the cut.
    square = _ms("v5e:16x16", "all-to-all", "x", x=256)
    assert square == pytest.approx(size / 4 / 32 / 50e6, rel=0.1)  # And latency.
    # Of two by four JAX makes one ring; pairs of its halves share two links.
    pairs = _ms("v5e:2x4", "all-gather", "x", x=2, y=4)
    assert pairs == pytest.approx(0.5 * size / 25e6, rel=near)


def test_tpus_are_taken_as_published():
    rates = cfp.described("v6e:2x4").rates
    assert rates.matmul_flops_per_ms["bfloat16"] == pytest.approx(918e9)
    assert rates.memory_bytes_per_ms == pytest.approx(1638e6)
    assert cfp.described("v5e:2x4").memory_bytes == int(15.75 * 2**30)


def test_names_of_kinds_are_distinct():
    assert len(kinds()) == len(set(kinds()))


@pytest.mark.parametrize(("share", "whole"), [("", 1000), ("0.5", 1500)])
def test_an_empty_share_of_memory_is_the_usual_one(monkeypatch, share, whole):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 750})
    assert _memory_bytes(SimpleNamespace(local_devices=[device])) == whole
