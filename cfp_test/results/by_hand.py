"""The page of plans beside shardings by hand, timed in turn with the same kernels."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from statistics import quantiles
from typing import Any

from cfp_test.results.pages import Figures, fixed, table

_WAYS = {
    "hand: fsdp": "by hand, fully sharded, cuDNN's attention",
    "hand: dp": "by hand, data parallel, cuDNN's attention",
    "plan: written": "plan, attention written out in the model",
    "plan: kernel": "plan, cuDNN's attention called by the model",
    "plan: sharding": "plan, attention kept as written",
}


def by_hand(data: Mapping[str, Any]) -> Figures:
    """A row for each way of each model, beside the best by hand of the same run."""
    rows = []
    for run in data["rows"]:
        hand = min(w["median_ms"] for n, w in run["ways"].items() if "hand" in n)
        links = "P2P off" if run["p2p_disabled"] else "NVLink"
        for name, way in run["ways"].items():
            low, _, high = quantiles(way["samples_ms"], n=4)
            memory = way.get("peak_bytes")
            rows.append(
                [
                    run["model"],
                    links,
                    _WAYS[name],
                    fixed(way["median_ms"], 1),
                    f"{low:.1f} to {high:.1f}",
                    fixed(way["median_ms"] / hand, 3),
                    fixed(way.get("predicted_ms"), 1),
                    fixed(way.get("planning_s"), 0),
                    way.get("winner"),
                    fixed(way["losses"][-1], 4),
                    fixed(memory / 1e9, 1) if memory else None,
                ]
            )
    head = (
        "model | links | way | ms | quartiles | of the best by hand | predicted ms | "
        "planning s | winner | loss of step 8 | GB"
    )
    first = data["rows"][0]
    lines = [
        "# Plans beside shardings by hand, with the same kernels",
        "",
        f"Two {first['device_kind']}, jax {first['jax']}, {first['date']}; "
        "`python -m cfp_test.bench.by_hand MODEL --ways ... --json FILE`. Four layers "
        "of width 4096, AdamW in float32, compute in bfloat16; gpt 12 × 1,024 tokens, "
        "llama4k 4 × 4,096. Every way starts from the same numbers, so losses of the "
        "same step can be compared. Eight samples of five steps each, in turn, in one "
        "process; every plan starts without anything measured before, but XLA keeps "
        "tuned kernels for the process, which helps all but the first.",
        "",
        table(head, rows),
        "",
        "By hand, fully sharded: each parameter on its largest dim, activations "
        "between layers on the batch. Raw, with every sample, clocks and logs of "
        "planning: [JSON](by_hand_h100x2_202611.json).",
        "",
        *data.get("notes", []),
    ]
    return {"page": "\n".join(lines).rstrip("\n") + "\n"}


def with_kernel(data: Mapping[str, Any]) -> Figures:
    """Steps by hand and as planned, both with the kernel that the model calls."""
    steps, planning = [], []
    has_commits = all("commit" in row for row in data["models"].values())
    for model, row in data["models"].items():
        hand, planned = row["samples_ms"]["hand"], row["samples_ms"]["planned"]
        ms, by_hand_ms = statistics.median(planned), statistics.median(hand)
        steps.append(
            [
                model,
                *(fixed(one, 1) for one in (by_hand_ms, ms)),
                *(f"{min(one):.1f} to {max(one):.1f}" for one in (hand, planned)),
                fixed(ms / by_hand_ms, 3),
                row["kernels"],
                *([row["commit"]] if "commit" in row else []),
            ]
        )
        took, check = row["planning"], row["check"]
        seconds = (took["profile_s"], took["race_s"], took["planning_s"])
        planning.append(
            [
                model,
                *(fixed(one, 1) for one in (*seconds, took["process_s"])),
                f"{check['most_off']:.1e}",
                fixed(check["seconds"], 0),
            ]
        )
    heads = data["tensor_parallel"]
    return {
        "steps": table(
            "model | by hand ms | plan ms | by hand, samples | plan, samples "
            "| plan / by hand | kernels in the program" + " | commit" * has_commits,
            steps,
        ),
        "planning": table(
            "model | profile s | race s | planning s | with the process's start s "
            "| check: most off | check s",
            planning,
        ),
        "heads": f"{heads['on_half_of_the_heads']} of {heads['kernels']}",
    }


def with_turns(data: Mapping[str, Any]) -> Figures:
    """The same, and what turns of a race found after rests of the devices."""
    ways = next(iter(data["turns_ms"].values()))
    turns = [
        [when, *(", ".join(fixed(ms, 1) for ms in one) for one in found.values())]
        for when, found in data["turns_ms"].items()
    ]
    return {**with_kernel(data), "turns": table(" | ".join(["", *ways]), turns)}
