"""Clusters that are described: what is read, priced and refused."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib import resources

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import cfp
from cfp.devices.described import cluster_of
from cfp.devices.device_kind import description_of, kind, kinds
from cfp.errors import MeshError, TargetError
from cfp.profiling.rates import Rates, sent_share

_WANTED = ("a100", "h100", "h200", "b200", "l40s")


def _files():
    folder = resources.files("cfp.devices").joinpath("kinds")
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


def test_a_file_with_hosts_alone_has_as_many_devices_in_each_as_the_kind(tmp_path):
    file = tmp_path / "four.toml"
    file.write_text('kind = "h200"\nhosts = 4\n')
    assert cfp.described(str(file)).axes == (("x", 4), ("y", 8))
    with pytest.raises(MeshError, match=r"hosts = 4, devices_per_host = 8"):
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
    ("text", "axes", "error", "message"),
    [
        ("4xh300", {}, TargetError, "no such kind"),
        ("four h200", {}, TargetError, "cannot be read"),
        ("missing.toml", {}, TargetError, "cannot be read"),
        (
            "0xh200",
            {},
            TargetError,
            "greater than or equal to 1",
        ),
        ("4xh200", {"x": 3}, MeshError, "not of the cluster's devices"),
        ("2x4xl40s", {}, TargetError, "a network between hosts"),
    ],
)
def test_bad_descriptions_have_one_clear_message(text, axes, error, message):
    with pytest.raises(error, match=message) as caught:
        cfp.described(text, **axes)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "expected",
        "got",
        "try",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("memory_gib = 40\n", "does not say all"),
        (
            'kind = "h200"\nbfloat16_tflop_per_s = -1\n',
            "s.value: Input should be greater",
        ),
        (
            'kind = "h200"\nmemory_gib = { value = 1, basis = "guessed" }\n',
            "memory_gib.basis: Input should be 'measured' or 'specified'",
        ),
        (
            'kind = "h200"\ndevices_per_host = 2.5\n',
            "host: Input should be a valid int",
        ),
        ('kind = "h200"\n[curves]\nall-gather = [[1, 0.0]]\n', "curves.all-"),
        (
            'kind = "h200"\nmemory_gib = true\n',
            "value: Input should be a val",
        ),
        ("kind = \n", "cannot be read"),
        ('kind = "h200"\nmemory_gb = 40\n', "memory_gib in place of memory_gb"),
        ('kind = "h200"\nhosts = 10000000\n', "less than or equal to 1048576"),
    ],
)
def test_bad_files_have_one_clear_message(tmp_path, content, message):
    file = tmp_path / "cluster.toml"
    file.write_text(content)
    with pytest.raises(TargetError, match=message):
        cfp.described(str(file))


def test_names_of_kinds_are_distinct():
    assert len(kinds()) == len(set(kinds()))
