"""Links as NVIDIA's driver describes them, as parts of a key.

The answers have the form in which nvidia-smi prints them.
"""

import pytest

from cfp.profiling import record
from cfp.profiling.record import (
    UNKNOWN,
    ProfileKey,
    gpu_parts,
)
from cfp.profiling.record import bus_of as cuda_bus_of

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
    f"{i}, {700 - 350 * (i == 3)}.00 W, 570.86.15, 00000000:1{i}:00.0\n"
    for i in range(4)
)


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    def ask(*words):
        return MATRIX if words[0] == "topo" else GPUS

    monkeypatch.setattr(record, "ask_driver", ask)
    monkeypatch.setattr(record, "bus_of", "0000:1{}:00.0".format)


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
        ([0, None], UNKNOWN),
    ],
)
def test_links_of_pairs_in_the_order_of_the_mesh(ordinals, links):
    assert gpu_parts(ordinals)["links"] == links


def test_a_pair_over_nvlink_does_not_answer_for_one_over_pcie():
    keys = [ProfileKey(tuple(gpu_parts(pair).items())) for pair in ([0, 1], [2, 3])]
    parts = [dict(key.parts) for key in keys]
    assert {n for n in parts[0] if parts[0][n] != parts[1][n]} == {
        "links",
        "power_limit",
    }


def test_power_and_driver():
    assert gpu_parts([0, 1]) == {
        "links": "NV18",
        "power_limit": "700.00 W",
        "driver": "570.86.15",
    }
    assert gpu_parts([3, 2])["power_limit"] == "350.00 W, 700.00 W"


@pytest.mark.parametrize(
    ("buses", "links"),
    [
        # The fastest first: the last of the host is CUDA's first.
        (["0000:13:00.0", "0000:10:00.0"], "SYS"),
        (["00000000:12:00.0", "0000:13:00.0"], "PIX"),
        (["", ""], UNKNOWN),
        (["0000:99:00.0", "0000:10:00.0"], UNKNOWN),
    ],
)
def test_numbers_follow_from_addresses_on_the_bus(buses, links, monkeypatch):
    monkeypatch.setattr(record, "bus_of", buses.__getitem__)
    assert gpu_parts([0, 1])["links"] == links


def test_without_cuda_no_address_is_known():
    assert cuda_bus_of(1000) == ""
