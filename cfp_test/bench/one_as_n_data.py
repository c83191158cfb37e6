"""Recorded steps beside what one GPU that played the devices has of each program.

    python -m cfp_test.bench.one_as_n_data FOLDER

FOLDER holds what `cfp_test.bench.one_as_four` wrote. Writes
``docs/results/one_as_four_h200_202611.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cfp.cost.schedule import Computed, Schedule, Sent, schedule_of
from cfp_test.bench.recorded import GPT, NARROW_GPT_OF_TWO

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FILE = RESULTS / "one_as_four_h200_202611.json"
# Two names of the same options, in races and in the comparison of options.
_SAME = (("nolhs", "no latency hiding"), ("large", "large collectives"))
# The first race of the MoE on two H200 was run before gradients were constrained
# behind their transposes. These presets compiled to other programs then.
_OLDER = ("data_parallel", "zero1", "fully_sharded", "expert_parallel")

Key = tuple[int, str, str, str]  # devices, target, links, name


def recorded() -> dict[Key, list[tuple[float, int]]]:
    """Takes over all races of a program the median in ms, and the peak in bytes."""
    found: dict[Key, list[tuple[float, int]]] = defaultdict(list)
    for key, samples, peak in _samples():
        if samples:
            found[key].append((statistics.median(samples), peak))
    return found


def races_of(key: Key) -> list[list[float]]:
    """Returns the samples of a program in each race, in ms, under all its names."""
    devices, target, links, name = key
    found = {(devices, target, links, one) for one in names_of(name)}
    return [samples for other, samples, _ in _samples() if other in found and samples]


@cache
def _samples() -> list[tuple[Key, list[float], int]]:
    return list(_read_samples())


def _read_samples() -> Iterator[tuple[Key, list[float], int]]:
    four = json.loads((RESULTS / "planning_h200x4_202611.json").read_text())
    for cell in four["cells"]:
        links = "P2P off" if cell["NCCL_P2P_DISABLE"] else "NVLink"
        if "warm" not in cell["what"]:
            for row in cell["race"]:
                if not row["note"]:
                    key = 4, " ".join(cell["target"]), links, row["name"]
                    yield key, row["samples_ms"], row["peak_bytes"]
    for race in four["options"]:
        links = "P2P off" if race["p2p"] else "NVLink"
        for row in race["rows"]:
            key = 4, " ".join(race["target"]), links, row["name"]
            yield key, row["samples"], row["peak"]
    for links, short in (("NVLink", "nvlink"), ("P2P off", "p2p_off")):
        file = f"gpt4_h200x4_202611_{short}.json"
        for row in json.loads((RESULTS / file).read_text())["race"]:
            name = row["name"].replace("planned", file)
            yield (4, GPT, links, name), row["samples_ms"], row["peak_bytes"]
    two = json.loads((RESULTS / "planning_h200x2_202611.json").read_text())
    for number, cell in enumerate(two):
        for row in cell["race"]:
            if number > 0 or row["name"] not in _OLDER:
                key = 2, " ".join(cell["target"]), "NVLink", row["name"]
                yield key, row["samples_ms"], row["peak_bytes"]
    depth = json.loads((RESULTS / "planning_depth_h200x2_202611.json").read_text())
    words = set(NARROW_GPT_OF_TWO.split())
    for cell in depth:
        if set(cell["target"]) == words and cell["what"] == "cold":
            for row in cell["race"]:
                if row["time_ms"]:
                    key = 2, NARROW_GPT_OF_TWO, "NVLink", row["name"]
                    yield key, [row["time_ms"]], 0


def names_of(name: str) -> list[str]:
    """The names under which pages have one program."""
    found = [name]
    for a, b in (*_SAME, *((b, a) for a, b in _SAME)):
        if name.endswith(f", {a}"):
            found.append(name.removesuffix(a) + b)
    return found


def schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    """A merged schedule, in whole megaflops and kilobytes."""
    return {
        "computed": [computed_to_json(c) for c in schedule.computed],
        "sent": [
            [s.kind, s.bytes, s.group_size, s.start, s.done, s.times]
            for s in schedule.sent
        ],
    }


def computed_to_json(computed: Computed) -> list[int]:
    """Kernels, in whole megaflops and kilobytes, and their count."""
    megaflops, kilobytes = computed.flops / 1e6, computed.moved_bytes / 1e3
    return [round(megaflops), round(kilobytes), computed.kernels]


def computed_from_json(data: Sequence[int]) -> Computed:
    """Reads kernels that `computed_to_json` wrote."""
    flops, size, kernels = data
    return Computed(flops=flops * 1e6, moved_bytes=size * 1e3, kernels=kernels)


def schedule_from_json(data: dict[str, Any]) -> Schedule:
    """Reads a schedule that `schedule_to_json` wrote."""
    return Schedule(
        tuple(map(computed_from_json, data["computed"])),
        tuple(
            Sent(
                kind=kind,
                bytes=size,
                group_size=group,
                start=start,
                done=done,
                times=times[0] if times else 1,
            )
            for kind, size, group, start, done, *times in data["sent"]
        ),
    )


def main() -> None:
    folder = Path(sys.argv[1])
    steps = recorded()
    page: dict[str, Any] = {"programs": []}
    for devices in (2, 4):
        run = json.loads((folder / f"one_as_{devices}.json").read_text())
        page.setdefault("environment", run["environment"])
        page.setdefault("rates_per_ms", {})[str(devices)] = run["rates_per_ms"]
        with tarfile.open(folder / f"one_as_{devices}_hlo.tar.gz") as tar:
            for row in run["rows"]:
                text = tar.extractfile(f"{row['file']}.txt")
                if text is None or not row.get("samples_ms"):
                    continue
                schedule = schedule_of(text.read().decode()).merged()
                links, peaks = {}, []
                for kind in ("NVLink", "P2P off"):
                    found = [
                        one
                        for name in names_of(row["name"])
                        for one in steps.get((devices, row["target"], kind, name), [])
                    ]
                    if found:
                        links[kind] = [round(ms, 3) for ms, _ in found]
                        peaks += [peak for _, peak in found if peak]
                page["programs"].append(
                    {
                        "devices": devices,
                        "target": row["target"],
                        "name": row["name"],
                        "peak_bytes": row["peak_bytes"],
                        "alone_ms": [round(ms, 3) for ms in row["samples_ms"]],
                        "recorded_ms": links,
                        "recorded_bytes": sorted(set(peaks)),
                        **schedule_to_json(schedule),
                    }
                )
    write_page(page)


def write_page(page: dict[str, Any]) -> None:
    """Writes the JSON, a line for each program."""
    names = ("two_layers", "without_gpu", "ablations", "programs")
    lists = {name: page.pop(name) for name in names if name in page}
    text = json.dumps(page, indent=1).removesuffix("\n}")
    for name, rows in lists.items():
        lines = [json.dumps(row, separators=(",", ":")) for row in rows]
        text += f',\n "{name}": [\n' + ",\n".join(lines) + "\n]"
    FILE.write_text(text + "}\n")


if __name__ == "__main__":
    main()
