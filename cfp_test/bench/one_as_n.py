"""Whole steps predicted on one GPU beside those recorded on 2 and 4.

    python -m cfp_test.bench.one_as_n          # the page and its picture
    python -m cfp_test.bench.one_as_n DIR      # another page, of new times on one GPU

DIR holds what `cfp_test.bench.one_as_four` wrote, with ``--times`` and ``--texts``.

The first page is of ``docs/results/one_as_four_h200_202611.json``. Its predictions are
those of the day, and stand in the file: the computation was timed where collectives do
nothing, and no later prediction takes such times. The other, of times on real numbers,
is of ``docs/results/one_as_four_again_h200_202611.json``.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cfp.cost.schedule import Computed, Schedule, schedule_of
from cfp.cost.step_time import StepTime, partitioned_compute_ms, step_time
from cfp.profiling.compiler_options import without_collectives
from cfp.profiling.rates import Rates
from cfp_test.bench.carried import (
    carried_over,
    launch_ms_of,
    rates_from_page,
    without_launches,
)
from cfp_test.bench.one_as_n_data import (
    FILE,
    RESULTS,
    computed_from_json,
    computed_to_json,
    races_of,
    schedule_from_json,
)
from cfp_test.bench.recorded import OPTIONS, cases
from cfp_test.results.pages import table

AGAIN = RESULTS / "one_as_four_again_h200_202611.json"
# Their times in chains without peer-to-peer access are proportional to their sizes.
_ONE_WAY = ("all-gather", "reduce-scatter")
PICTURE = RESULTS.parent / "pictures" / "one_as_four_h200_202611.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A program's step, recorded and predicted.

    Attributes:
        row: of the JSON.
        links: between the devices.
        recorded_ms: median of the races' medians.
        predicted: on one GPU.
    """

    row: dict[str, Any]
    links: str
    recorded_ms: float
    predicted: StepTime

    @property
    def error(self) -> float:
        """Predicted over recorded, less one."""
        return self.predicted.total_ms / self.recorded_ms - 1

    @property
    def races_ms(self) -> list[list[float]]:
        """Samples of each race."""
        row = self.row
        if "races_ms" in row:
            return row["races_ms"]
        return races_of((row["devices"], row["target"], self.links, row["name"]))

    @property
    def model(self) -> str:
        """Kind of the model."""
        return {"gpt": "GPT", "moe": "MoE"}[self.row["target"].split()[0]]


def link_rates(data: dict[str, Any]) -> dict[tuple[int, str], Rates]:
    """Rates of collectives on 2 and 4 H200; products and memory as on the one."""
    own = data["rates_per_ms"]["4"]
    dtypes = {name: rate for name, rate in own.items() if name != "memory"}

    def curves(file: str) -> Rates:
        found = rates_from_page(json.loads((RESULTS / file).read_text()))
        return replace(
            found, matmul_flops_per_ms=dtypes, memory_bytes_per_ms=own["memory"]
        )

    two = curves("curves_h200x2_202611_nvlink.json")
    latency = {kind: curve[0][1] for (kind, _), curve in two.curves.items()}

    old = curves("curves_h200x4_202611_p2p_off.json")
    launch_ms = launch_ms_of(old.curves[kind, ("x",)] for kind in _ONE_WAY)

    return {
        (2, "NVLink"): two,
        (4, "NVLink"): carried_over(two, (("x", 4),)),
        (4, "P2P off"): replace(
            old,
            curves={
                (kind, group): without_launches(curve, launch_ms, latency[kind])
                for (kind, group), curve in old.curves.items()
            },
        ),
    }


def pairs(data: dict[str, Any], devices: int) -> list[Pair]:
    """All programs that were recorded on so many devices, as they were predicted."""
    return [
        Pair(
            row=row,
            links=links,
            recorded_ms=statistics.median(times),
            predicted=StepTime(**row["predicted"][links]),
        )
        for row in data["programs"]
        if row["devices"] == devices
        for links, times in row["recorded_ms"].items()
    ]


def predict(data: dict[str, Any]) -> None:
    """Adds to each program what is predicted of it, by kinds of links.

    Args:
        data: with times of computations on real numbers.
    """
    for row in data["programs"]:
        row["predicted"] = {}
        schedule, ms = schedule_from_json(row), statistics.median(row["alone_ms"])
        ran = _ran(schedule, row)
        for links in row["recorded_ms"]:
            rates = link_rates(data)[row["devices"], links]
            alone = partitioned_compute_ms(schedule, ran, rates, ms)
            clock = row.get("clock_mhz") or 0.0
            highest = data.get("highest_mhz", 0.0) / clock if clock else 1.0
            found = step_time(
                schedule,
                rates,
                computation_ms=alone,
                highest_clock=max(1.0, highest),
            )
            row["predicted"][links] = asdict(found)


def _ran(schedule: Schedule, row: dict[str, Any]) -> Computed:
    """Finds what ran of a program on one GPU: by its texts, or with copies alone."""
    own = schedule.computation
    gathers = [one for one in schedule.sent if one.kind == "all-gather"]
    copied = sum(one.times * one.bytes * (1 + 1 / one.group_size) for one in gathers)
    copies = Computed(
        flops=0.0, moved_bytes=copied, kernels=sum(one.times for one in gathers)
    )
    more = computed_from_json(row["more"]) if "more" in row else copies
    return replace(
        own,
        moved_bytes=own.moved_bytes + more.moved_bytes,
        kernels=own.kernels + more.kernels,
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, with mean ranks for ties."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [
            sum(v < one for v in values) + (sum(v == one for v in values) - 1) / 2
            for one in values
        ]

    return statistics.correlation(ranks(first), ranks(second))


def groups(found: Iterable[Pair]) -> dict[str, list[Pair]]:
    """By model and links."""
    by_name: dict[str, list[Pair]] = {}
    for one in found:
        by_name.setdefault(f"{one.model}, {one.links}", []).append(one)
    return by_name


def summary(name: str, found: Sequence[Pair]) -> list[str]:
    """A row of the table of groups."""
    errors = [abs(one.error) for one in found]
    rank = rank_correlation(
        [one.predicted.total_ms for one in found], [one.recorded_ms for one in found]
    )
    return [
        name,
        str(len(found)),
        f"{statistics.median(errors):.1%}",
        f"{max(errors):.1%}",
        f"{statistics.fmean(one.error for one in found):+.1%}",
        f"{rank:.3f}",
    ]


_DRAWN = 2000  # Recordings that might have been.


@dataclass(frozen=True, slots=True)
class Reach:
    """Rank correlations that would be seen if every prediction were right.

    Attributes:
        spread: of the samples of one race, of their mean.
        recorded: with as many samples of as much noise as were recorded: the median,
            and what 5 % and 95 % of such recordings stay below.
        both: the same with the noise of the predictions' own runs.
    """

    spread: float
    recorded: tuple[float, float, float]
    both: tuple[float, float, float]


def reach(found: Sequence[Pair]) -> Reach:
    """Draws recordings of steps that take exactly what is predicted."""
    squares, free = 0.0, 0
    for one in found:
        for race in one.races_ms:
            logs = [math.log(ms) for ms in race]
            squares += sum((x - statistics.fmean(logs)) ** 2 for x in logs)
            free += len(race) - 1
    spread = math.sqrt(squares / free)
    draw = random.Random(0)

    def drawn(with_runs: bool) -> tuple[float, float, float]:
        ranks = sorted(
            _drawn_rank(found, spread, with_runs, draw) for _ in range(_DRAWN)
        )
        return ranks[_DRAWN // 2], ranks[_DRAWN // 20], ranks[-_DRAWN // 20]

    return Reach(spread, drawn(False), drawn(True))


def _drawn_rank(
    found: Sequence[Pair], spread: float, with_runs: bool, draw: random.Random
) -> float:
    recorded, predicted = [], []
    for one in found:
        samples = sum(map(len, one.races_ms))
        noise = draw.gauss(0, spread / math.sqrt(samples))
        recorded.append(one.predicted.total_ms * math.exp(noise))
        runs = one.row["alone_ms"]
        own = statistics.stdev(map(math.log, runs)) / math.sqrt(len(runs))
        off_ms = draw.gauss(0, own) * one.predicted.computation_ms if with_runs else 0.0
        predicted.append(one.predicted.total_ms + off_ms)
    return rank_correlation(predicted, recorded)


def again_figures(data: dict[str, Any]) -> dict[str, str]:
    """Tables of the page of times on real numbers."""
    reached = {name: Reach(**noise) for name, noise in data["reach"].items()}
    return tables_of(_again(data), reached)


def _again(data: dict[str, Any]) -> list[Pair]:
    return [
        Pair(
            row={**one, "target": one["model"].lower()},
            links=one["links"],
            recorded_ms=one["recorded_ms"],
            predicted=StepTime(**one["predicted"]),
        )
        for one in data["rows"]
    ]


def tables_of(found: Sequence[Pair], reached: Mapping[str, Reach]) -> dict[str, str]:
    """Tables of groups, of the rank correlations they could have, and of programs."""
    rows = [
        [
            f"{one.model}, {one.links}",
            one.row["name"],
            f"{statistics.median(one.row['alone_ms']):.1f}",
            f"{one.row['clock_mhz']:.0f}",
            f"{one.predicted.hidden_ms:.1f}",
            f"{one.predicted.exposed_ms:.1f}",
            f"{one.predicted.total_ms:.1f}",
            f"{one.recorded_ms:.1f}",
            f"{one.error:+.1%}",
        ]
        for one in found
    ]
    return {
        "groups": table(
            "group | programs | median error | worst | mean | rank correlation",
            [summary(name, group) for name, group in groups(found).items()],
        ),
        "reach": table(
            "group | recorded in one race differs by | rank correlation of right "
            "predictions | in 5 % of recordings below | with the noise of one GPU's "
            "runs | in 5 % below | found",
            [
                [
                    name,
                    f"{noise.spread:.1%}",
                    f"{noise.recorded[0]:.3f}",
                    f"{noise.recorded[1]:.3f}",
                    f"{noise.both[0]:.3f}",
                    f"{noise.both[1]:.3f}",
                    summary(name, group)[-1],
                ]
                for name, group in groups(found).items()
                for noise in [reached[name]]
            ],
        ),
        "programs": table(
            "group | program | local ops ms | at MHz | hidden | exposed | predicted "
            "| recorded | error",
            rows,
        ),
    }


def main() -> None:
    if folder := sys.argv[1:]:
        data = played_again(Path(folder[0]))
        predict(data)
        found = pairs(data, 4)
        for name, group in groups(found).items():
            print(*summary(name, group), sep=" | ")
        rows = [
            {
                "model": one.model,
                "links": one.links,
                "name": one.row["name"],
                "alone_ms": [round(ms, 4) for ms in one.row["alone_ms"]],
                "clock_mhz": one.row["clock_mhz"],
                "recorded_ms": one.recorded_ms,
                "predicted": asdict(one.predicted),
                **({"more": one.row["more"]} if "more" in one.row else {}),
            }
            for one in found
        ]
        text = ",\n".join(json.dumps(row) for row in rows)
        page = {
            "highest_mhz": data["highest_mhz"],
            "reach": {
                name: asdict(reach(group)) for name, group in groups(found).items()
            },
        }
        AGAIN.write_text(f'{json.dumps(page)[:-1]}, "rows": [\n{text}]}}\n')
        return
    from cfp_test.bench import one_as_n_page

    one_as_n_page.write(json.loads(FILE.read_text()))


def played_again(folder: Path) -> dict[str, Any]:
    """The recorded programs of 4 H200 with times of `cfp_test.bench.one_as_four`."""
    data = json.loads(FILE.read_text())
    new = json.loads((folder / "one_as_4.json").read_text())
    times = {
        (row["target"], row["name"]): {
            "alone_ms": row["samples_ms"],
            "clock_mhz": row.get("clock_mhz", 0.0),
        }
        for row in new["rows"]
        if row.get("samples_ms")
    }
    more = more_in(folder / "one_as_4_hlo.tar.gz")
    data["highest_mhz"] = new.get("highest_mhz", 0.0)
    data["programs"] = [
        {**row, **times[row["target"], row["name"]], **more(row)}
        for row in data["programs"]
        if row["devices"] == 4 and (row["target"], row["name"]) in times
    ]
    _share_runs(data)
    return data


def _share_runs(data: dict[str, Any]) -> None:
    """Gives programs of one computation all of its runs, as plans take them.

    Options that join or move collectives change little of what is computed: a time of
    another such program counts, times what is estimated of both computations.
    """
    computations = {
        (case.target, case.name): (
            case.target,
            case.preset,
            case.level,
            *without_collectives(sorted(OPTIONS[case.options].items())),
        )
        for case in cases(4)
    }
    alike: dict[Any, list[dict[str, Any]]] = {}
    for row in data["programs"]:
        key = computations[row["target"], row["name"]]
        alike.setdefault(key, []).append(row)
    rates = link_rates(data)[4, "NVLink"]
    for rows in alike.values():
        estimated_ms = [
            step_time(Schedule(schedule_from_json(row).computed, ()), rates).total_ms
            for row in rows
        ]
        shares = [
            ms / estimated
            for row, estimated in zip(rows, estimated_ms, strict=True)
            for ms in row["alone_ms"]
        ]
        clock_mhz = statistics.median(row["clock_mhz"] for row in rows)
        for row, estimated in zip(rows, estimated_ms, strict=True):
            row["alone_ms"] = [share * estimated for share in shares]
            row["clock_mhz"] = clock_mhz


def more_in(file: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns what tells what a program's computation by itself moves more than it.

    Args:
        file: texts of `cfp_test.bench.one_as_four`. What only joins or moves
            collectives is told of the same program with default options.
    """
    found: dict[tuple[str, str], list[int]] = {}
    if file.exists():
        with tarfile.open(file) as tar:
            names = set(tar.getnames())
            for case in cases(4):
                pair = f"{case.file}.txt", f"{case.file}_local.txt"
                if names.issuperset(pair):
                    own, ran = (_computed(tar, name) for name in pair)
                    less = [-n for n in computed_to_json(own)]
                    more = map(sum, zip(computed_to_json(ran), less, strict=True))
                    found[case.target, case.name] = list(more)

    def more_of(row: dict[str, Any]) -> dict[str, Any]:
        target, name = row["target"], row["name"]
        base = name.removesuffix(f", {name.rpartition(', ')[2]}")
        known = found.get((target, name)) or found.get((target, base))
        return {"more": known} if known else {}

    return more_of


def _computed(tar: tarfile.TarFile, name: str) -> Computed:
    text = tar.extractfile(name)
    assert text is not None, "a file"
    return schedule_of(text.read().decode()).computation


if __name__ == "__main__":
    main()
