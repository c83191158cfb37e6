"""Links as NVIDIA's driver describes them, as parts of a key.

The answers have the form in which nvidia-smi prints them.
"""

import pytest

from cfp.profiling import topology
from cfp.profiling.key import ProfileKey
from cfp.profiling.topology import (
    UNKNOWN,
    bus_of,
    gpu_parts,
    numbers_of,
)

# Two pairs over NVLink, with PCIe between them, and a network card.
MATRIX = (
    "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tSYS\tNODE\t0-47\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tPIX\tSYS\t48-95\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tPIX\t X \tSYS\t48-95\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \n\n"
    "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n"
)
GPUS = "".join(
    f"{i}, GPU-{i}aaa-bbb, {700 - 350 * (i == 3)}.00 W, 570.86.15, 00000000:1{i}:00.0\n"
    for i in range(4)
)


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    def ask(*words):
        return MATRIX if words[0] == "topo" else GPUS

    monkeypatch.setattr(topology, "ask_driver", ask)


@pytest.fixture(autouse=True)
def all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("ordinals", "links"),
    [
        ([0, 1], "NV18"),
        ([2, 3], "PIX"),
        ([0, 2], "SYS"),
        ([0, 1, 2, 3], "NV18,SYS,SYS,SYS,SYS,PIX"),
        ([0, 2, 1, 3], "SYS,NV18,SYS,SYS,PIX,SYS"),
        ([1], ""),
        ([], ""),
        ([0, 7], UNKNOWN),
    ],
)
def test_links_of_pairs_in_the_order_of_the_mesh(ordinals, links):
    assert gpu_parts(ordinals)["links"] == links


def test_a_pair_over_nvlink_does_not_answer_for_one_over_pcie():
    keys = [ProfileKey(tuple(gpu_parts(pair).items())) for pair in ([0, 1], [2, 3])]
    assert keys[0].digest != keys[1].digest
    assert keys[0].differing(keys[1]) == ("links", "power_limit")


def test_power_and_driver():
    assert gpu_parts([0, 1]) == {
        "links": "NV18",
        "power_limit": "700.00 W",
        "driver": "570.86.15",
    }
    assert gpu_parts([3, 2])["power_limit"] == "350.00 W, 700.00 W"


@pytest.mark.parametrize(
    ("visible", "links"),
    [("2,3", "PIX"), ("1,0", "NV18"), ("GPU-2a,GPU-3aaa", "PIX"), ("MIG-x,0", UNKNOWN)],
)
def test_devices_that_are_counted_anew(visible, links, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_parts([0, 1])["links"] == links


@pytest.mark.parametrize(
    ("buses", "numbers"),
    [
        # The fastest first: the last of the host is CUDA's first.
        (["0000:13:00.0", "0000:10:00.0"], [3, 0]),
        (["00000000:11:00.0", "0000:12:00.0"], [1, 2]),
        (["", ""], [0, 1]),
        (["0000:99:00.0", "0000:10:00.0"], [0, 1]),
    ],
)
def test_numbers_follow_from_addresses_on_the_bus(buses, numbers, monkeypatch):
    monkeypatch.setattr(topology, "bus_of", buses.__getitem__)
    assert numbers_of([0, 1]) == numbers
    links = gpu_parts([0, 1])["links"]
    assert links == {(3, 0): "SYS", (1, 2): "SYS", (0, 1): "NV18"}[tuple(numbers)]


def test_addresses_come_before_what_the_environment_names(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    for bus, number in (("0000:12:00.0", 2), ("", 3)):
        monkeypatch.setattr(topology, "bus_of", lambda ordinal, bus=bus: bus)
        assert numbers_of([0]) == [number]
    assert numbers_of([None]) == [-1]


def test_without_cuda_no_address_is_known():
    assert bus_of(1000) == ""
