"""Tuning, building and running; whole models; rematerialization."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cfp_test.results.pages import Figures, fixed, gib, plain, table

# What is rematerialized, as the JSON names it.
_AGAIN = {
    "ours": "every layer, by cfp, in the differentiated program",
    "model": "every layer, by `jax.checkpoint` in the model",
    "none": "nothing",
}
_PRESETS = ("data_parallel", "fully_sharded", "tensor_parallel")


def _medians_ms(one: Mapping[str, Any]) -> float:
    """The sum of the medians of all programs of a run."""
    return sum(statistics.median(samples) for samples in one["samples_ms"].values())


def building(data: Mapping[str, Any]) -> Figures:
    """The figures of the page of building."""
    first = [
        [
            one["name"],
            one["options"]["tune"],
            one["options"]["overlap"],
            fixed(one["tune_seconds"], 1),
            fixed(one["profile_seconds"], 1),
            fixed(one["run_seconds"], 1),
            fixed(_medians_ms(one), 1),
        ]
        for one in data["building"]
    ]
    beside = [
        [
            "beside the tuning" if one["options"]["tune"] == "True" else "after it",
            fixed(one["tune_seconds"], 1),
            fixed(one["profile_seconds"], 1),
            fixed(one["run_seconds"], 1),
            fixed(one["tune_seconds"] + one["profile_seconds"], 1),
            fixed(_medians_ms(one), 1),
        ]
        for one in data["beside_tuning"]
    ]
    turn = [one for one in data["running"] if one["turn"] == 0]
    times = [round(seconds, 1) for seconds, _ in turn[0]["seconds_and_ms"]]
    running = [
        [plain(one["name"]), *(fixed(ms, 1) for _, ms in one["seconds_and_ms"])]
        for one in turn
    ]
    whole = [
        [
            one["wave"],
            one["n"],
            one["threads"],
            fixed(one["wall"], 1),
            f"{one['user'] + one['sys'] + one['cuser'] + one['csys']:.0f}",
            f"{one['cuser'] + one['csys']:.0f}",
            "; ".join(one["err"]),
        ]
        for one in data["whole_programs_at_once"]
    ]
    raced = {
        (one["target"], one["raced"]): one["ms"]
        for one in data["fusion_autotuner"]
        if "raced" in one
    }
    tuner = [
        [
            f"{target}, {plain(raced_as.removesuffix(' default'))}",
            fixed(ms),
            fixed(raced[target, raced_as.replace(" default", " off")]),
        ]
        for (target, raced_as), ms in raced.items()
        if raced_as.endswith(" default")
    ]
    return {
        "first": table(
            "run | tunes | builds beside what runs | tuning s | "
            "building and running s | running s | sum of the medians ms",
            first,
        ),
        "beside": table(
            "builds | tuning s | building and running s | running s | in all s | "
            "sum of the medians ms",
            beside,
        ),
        "running": table(" | ".join(["", *(f"{s} s" for s in times)]), running),
        "whole": table(
            "| programs | threads | s | processor s | of children | error", whole
        ),
        "tuner": table("| on ms | off ms", tuner),
    }


def full_models(data: Mapping[str, Any], by_hand: Mapping[str, Any]) -> Figures:
    """The figures of the page of whole models."""
    names = {"gpt": "GPT-2.6B", "llama": "LLaMA-2-7B"}
    nominal = by_hand["nominal_bfloat16_flops_per_ms"]["value"]
    trained, phases, races, ratios, shares = [], [], [], [], []
    presets: dict[str, None] = {}
    for key, rows in data.items():
        plan = next(row for row in rows if row["what"] == "planned")
        ratios.append(plan["plan"]["ratio"])
        spent = plan["phases_seconds"]
        phases.append(
            [
                names[key],
                fixed(spent["devices and target"] + spent["trace and analysis"], 1),
                fixed(spent["profile"], 1),
                plan["plan"]["search"]["strategies_measured"],
                fixed(spent["search"], 1),
                fixed(spent["race"], 1),
                by_hand["race_compiling_seconds"]["value"][key],
            ]
        )
        race = plan["plan"]["race"]
        for line, field in (("predicted", "predicted_ms"), ("measured", "samples_ms")):
            found = {one["name"]: _time(one[field]) for one in race}
            races.append((f"{names[key]}, {line}", found))
            presets.update(dict.fromkeys(found))
        for row in rows:
            if row["what"] != "trained":
                continue
            share = row["mfu"] * row["bfloat16_flops_per_ms"] / nominal
            shares.append(share)
            trained.append(
                [
                    names[key],
                    "planned" if row["is_the_plan"] else plain(row["plan"]),
                    fixed(row["raced_ms"], 1),
                    fixed(row["in_a_row_ms"], 1),
                    f"{row['tokens_per_second']:,.0f}",
                    f"{row['mfu']:.1%}",
                    f"{share:.1%}",
                    gib(row["compiled_bytes"], 1),
                    gib(row["device_peak_bytes"], 1),
                    f"{row['losses'][0]:.3f} to {row['losses'][-1]:.3f}",
                ]
            )
    ordered = sorted(presets, key=lambda name: name.startswith("planned"))
    return {
        "trained": table(
            "model | plan | raced ms | step ms in training | tokens/s | "
            "of the measured rate | of the nominal rate | compiled GiB | device GiB | "
            "loss",
            trained,
        ),
        "races": table(
            " | ".join(["", *map(plain, ordered)]),
            [[title, *(found.get(n, "") for n in ordered)] for title, found in races],
        ),
        "phases": table(
            "model | devices, trace, analysis s | profile s | strategies | search s | "
            "race s | of it compiling (noted)",
            phases,
        ),
        "ratios": " and ".join(f"{ratio:.3f}" for ratio in ratios),
        "nominal": f"{nominal / 1e9:.1f}",
        "nominal_share": f"{min(shares):.0%} to {max(shares):.0%}",
    }


def _time(found: Any) -> str:
    if isinstance(found, list):
        return fixed(statistics.median(found), 1) if found else "not raced"
    return fixed(found, 1)


def recompute(data: Sequence[Mapping[str, Any]]) -> Figures:
    """The figures of the page of rematerialization on devices."""
    lines = []
    for row in data:
        # The fourth shortest of eight runs, as the page says.
        median = sorted(row["times"])[3]
        lines.append(
            [
                _AGAIN[row["name"]],
                fixed(row["temp_gib"]),
                fixed(row["high_water_gib"]),
                fixed(row["args_gib"] + row["temp_gib"]),
                fixed(median, 1),
                f"{row['loss']:.6f}",
            ]
        )
    return {
        "rows": table(
            "computed again | temporaries GiB, by the compiler | high-water mark GiB | "
            "arguments and temporaries GiB | step ms | loss",
            lines,
        )
    }


def compiled(data: Sequence[Mapping[str, Any]]) -> Figures:
    """The figures of the page of rematerialization, compiled without devices."""
    found: dict[tuple[str, int], dict[str, int]] = {}
    for row in data:
        key = (row["version"], row["computed_again"])
        found.setdefault(key, {})[row["preset"]] = row["peak_bytes"]
    return {
        "rows": table(
            " | ".join(
                ["version", "computed again", *(f"{plain(p)} GB" for p in _PRESETS)]
            ),
            [
                [
                    version,
                    f"{again} segments" if again else "nothing",
                    *(fixed(of[p] / 1e9) if p in of else None for p in _PRESETS),
                ]
                for (version, again), of in found.items()
            ],
        )
    }


def overwritten(data: Mapping[str, Any]) -> Figures:
    """The figures of the page of values that are read too late."""
    lines = [
        [
            plain(row["preset"]),
            ", ".join(f"`{name}={value}`" for name, value in row["options"].items()),
            f"`{row['overwritten']}`",
            fixed(row["peak_bytes"] / 1e9),
        ]
        for row in data["rows"]
        if row["overwritten"]
    ]
    survey = data["survey"]["rows"]
    changed = [row for row in survey if row["rematerialized"]]
    return {
        "rows": table(
            "preset | options | what is read too late | GB, compiled right", lines
        ),
        "surveyed": str(len(survey)),
        "untouched": str(len(survey) - len(changed)),
        "changed": str(len(changed)),
        "wrong": str(sum(bool(row["overwritten"]) for row in survey)),
    }


def miscompiled(data: Mapping[str, Any]) -> Figures:
    """The figures of the page of steps that XLA compiled wrong, run on a GPU."""
    alone = [row for row in data["rows"] if row["part"] == "alone"]
    played = [row for row in data["rows"] if row["part"] == "played"]
    ran = [row for row in alone if "off" in row]
    good = [row for row in ran if not row["read_too_late"]]
    bad = [row for row in ran if row["read_too_late"]]
    return {
        "device": data["device"],
        "date": data["date"],
        "jax": data["jax"],
        "ran": str(len(ran)),
        "wrong": str(len(bad)),
        "good": str(len(good)),
        "good_off": f"{max(_farthest(row) for row in good):.1e}",
        "right_off": f"{max(_farthest(row['right']) for row in ran):.1e}",
        "alone": table(_MISCOMPILED_COLUMNS, [_miscompiled(row) for row in alone]),
        "played": table(_MISCOMPILED_COLUMNS, [_miscompiled(row) for row in played]),
    }


_MISCOMPILED_COLUMNS = (
    "step | limit | computed again by the compiler | what is read too late | off by | "
    "compiled otherwise, off by | temporaries, GB | otherwise, GB"
)
_LIMIT = "xla_gpu_memory_limit_slop_factor"
_LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
_TRITON = "xla_gpu_enable_triton_gemm"


def _farthest(seen: Mapping[str, Any]) -> float:
    return max(one["relative_l2"] for one in seen["off"])


def _miscompiled(row: Mapping[str, Any]) -> list[str]:
    options = row["options"]
    limit = f"{options[_LIMIT]} %"
    if options.get(_LATENCY_HIDING) == "False":
        limit += ", no latency hiding"
    if options[_TRITON] == "True":
        limit += ", Triton's products"

    def off(seen: Mapping[str, Any]) -> str:
        if "off" not in seen:
            return "not run"
        most = max(seen["off"], key=lambda one: one["relative_l2"])
        far = most["relative_l2"]
        return "0" if far == 0 else f"{far:.1e} in {most['leaf']}"

    return [
        row["target"],
        limit,
        str(row["rematerialized"]),
        f"`{row['read_too_late']}`" if row["read_too_late"] else "nothing",
        off(row),
        off(row["right"]),
        fixed(row["temp_bytes"] / 1e9),
        fixed(row["right"]["temp_bytes"] / 1e9),
    ]


def tuning(data: Mapping[str, Any]) -> dict[str, str]:
    """Tables of compiles and plans with fewer kernels to try out."""
    parts = [name for name in data["plans"][0]["parts"]]
    named = [name.removeprefix("seconds_in_").replace("_", " ") for name in parts]
    return {
        **{name: data[name] for name in ("device", "jax", "python", "date", "commit")},
        "refused": ", ".join(f"`{one}`" for one in sorted({*data["refused"].values()})),
        "steps": table(
            "kernels tried | fully sharded, compile s | processor s | step ms | "
            "data parallel, compile s | processor s | step ms",
            [
                [_TRIED[row["name"]]]
                + [
                    fixed(row[f"{kind}_{what}"])
                    for kind in ("fsdp", "dp")
                    for what in ("compile_s", "cpu_s", "ms")
                ]
                for row in data["steps"]
                if row["name"] in _TRIED
            ],
        ),
        "plans": table(
            f"Triton's products | planned in s | {' | '.join(named)} | plan | step ms",
            [
                [
                    "no" if "triton" in row["xla_flags"] else "yes",
                    fixed(row["seconds"]),
                    *(fixed(row["parts"][name]) for name in parts),
                    row["winner"],
                    fixed(row["measured_ms"]),
                ]
                for row in data["plans"]
            ],
        ),
    }


_TRIED = {
    "base": "XLA's defaults",
    "max8": "8 of the library's",
    "notriton": "none of Triton's",
    "costtop4": "4 by the cost model",
    "level1": "level 1",
    "nocudnn": "none of cuDNN's",
}


def whole_models(data: Mapping[str, Any]) -> Figures:
    """The races and the trainings of whole models."""
    planned = {
        row["target"][0]: row for row in data["rows"] if row["what"] == "planned"
    }
    trained = [row for row in data["rows"] if row["what"] == "trained"]

    def shares(model: str, ms: float) -> list[str]:
        """Shares of the rate of an H200, nominal (FLOP a ms) and measured."""
        done = planned[model]["flops"] / planned[model]["devices"] / ms
        rate = planned[model]["bfloat16_flops_per_ms"]
        return [f"{done / 989.5e9:.1%}", f"{done / rate:.1%}"]

    return {
        **{
            name: data[name]
            for name in ("device", "jax", "python", "date", "commit", "command")
        },
        "trained": table(
            "model | plan | alone ms | in a row ms | tokens/s | of 989.5 TFLOP/s | "
            "of the measured rate | device GiB | loss",
            [
                [
                    row["target"][0],
                    plain(row["plan"]) + (", the plan" if row["is_the_plan"] else ""),
                    fixed(row["step_ms"], 1),
                    fixed(row["in_a_row_ms"], 1),
                    f"{row['tokens_per_second']:,.0f}",
                    *shares(row["target"][0], row["in_a_row_ms"]),
                    gib(row["device_peak_bytes"]),
                    f"{row['losses'][0]:.3f} to {row['losses'][-1]:.3f}",
                ]
                for row in trained
            ],
        ),
        "race": table(
            "model | candidate | predicted ms | measured ms | GiB",
            [
                [
                    model,
                    plain(one["name"]),
                    fixed(one["predicted_ms"], 1),
                    fixed(statistics.median(one["samples_ms"]), 1),
                    gib(one["peak_bytes"]),
                ]
                for model, row in planned.items()
                for one in row["plan"]["race"]
                if one["samples_ms"]
            ],
        ),
        "planning": table(
            "model | TFLOP a step | planned in s | of it",
            [
                [
                    model,
                    fixed(row["flops"] / 1e12, 1),
                    fixed(sum(row["phases_seconds"].values()), 1),
                    ", ".join(
                        f"{name} {fixed(seconds, 1)}"
                        for name, seconds in row["phases_seconds"].items()
                    ),
                ]
                for model, row in planned.items()
            ],
        ),
    }


def planning_parts(*suites: Mapping[str, Any]) -> dict[str, str]:
    """A table of the seconds that plans from empty stores took, by part."""
    rows = []
    for suite in suites:
        for piece in suite["pieces"]:
            counts = (piece.get("planning") or {}).get("counts", {})
            seconds = {
                name.removeprefix(_PART): value
                for name, value in counts.items()
                if name.startswith(_PART)
            }
            if not seconds:
                continue
            kind = piece["environment"]["device_kind"].removeprefix("NVIDIA ")
            model, _, what = piece["piece"].partition(":")
            links = "without P2P" if what.startswith("off") else "NVLink"
            row = [model, links, kind.partition(" ")[0], piece["date"][:10]]
            row.append(fixed(piece["planning"]["planning_s"]))
            rows.append([*row, *(fixed(seconds.get(name, 0.0)) for name in _PARTS)])
    names = " | ".join(name.replace("_", " ") for name in _PARTS)
    columns = f"model | links | GPUs | date | planned in s | {names}"
    return {"parts": table(columns, sorted(rows))}


_PART = "seconds_in_"
_PARTS = (
    "rates",
    "tuning",
    "builds",
    "runs",
    "whole",
    "warm_up",
    "looks",
    "variants",
    "warm_up_again",
    "turns",
)
