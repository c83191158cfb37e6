"""Pages of attention: the matrix of strategies, and what one GPU measured."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

from cfp_test.results.pages import Figures, fixed, table


def matrix(data: Mapping[str, Any]) -> Figures:
    """The worst of each row of cells: a strategy on some devices in a dtype."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for cell in data["cells"]:
        strategy, devices, _, _, dtype, *_ = cell["name"].split(" / ")
        groups[strategy, devices, dtype].append(cell)
    names = ("out", "dq", "dk", "dv")
    rows = [
        [
            *group,
            len(cells),
            *(f"{max(c['relative_l2'][n] for c in cells):.1e}" for n in names),
            f"{cells[0]['allowed']:.0e}",
        ]
        for group, cells in groups.items()
    ]
    head = "strategy | devices | dtype | cells | out | dq | dk | dv | allowed"
    over = [c for c in data["cells"] if max(c["relative_l2"].values()) > c["allowed"]]
    lines = [
        "# Strategies of attention against a float32 oracle, November 2026",
        "",
        f"{len(data['cells'])} of {data['of']} cells so far, on virtual CPU devices, "
        f"jax {data['jax']}. All cells are strategies, causal, full, sliding-window "
        "and packed masks, MHA, GQA and MQA, "
        "float32 and bfloat16, 2, 4 and 8 devices; and on 4 devices heads and lengths "
        "that do not divide, and chunks. Relative L2 distance of output and gradients, "
        f"the worst of each row's cells. {len(over)} cells are further away than "
        "allowed.",
        "",
        table(head, rows),
        "",
        *(f"- too far: {cell['name']}: {cell['relative_l2']}" for cell in over),
        "",
        "Made by `python cfp_test/scripts/attention_matrix.py`, which goes on where it "
        "was stopped, and `python -m cfp_test.results`; raw: "
        "[JSON](attention_matrix_cpu_202611.json), with a row for each cell. The same "
        "cells are tests in `cfp_test/attention/test_matrix.py`, a part of them in CI.",
    ]
    return {"page": "\n".join(lines) + "\n"}


def gpu(data: Mapping[str, Any]) -> Figures:
    """Figures that `attention_gpu.py` measured, a row for each row."""
    kernels = [row for row in data["rows"] if row["what"] == "kernel"]
    rings = [row for row in data["rows"] if row["what"] in ("ring", "zigzag")]
    matmul = next(row for row in data["rows"] if row["what"] == "matmul")

    def cells(row: Mapping[str, Any], percent: str) -> list[Any]:
        is_measured = row["status"] == "measured"
        said = None if is_measured else " ".join(row["status"].split())
        measured = [row.get("ms"), row.get("tflops_per_s"), row.get(percent)]
        return [*(fixed(one, 1) for one in measured), said]

    lines = [
        f"# Attention on one {data['device']}, {data['date']}",
        "",
        f"jax {data['jax']}, {data['dtype']}, {data['heads']} heads of "
        f"{data['head_dim']}, causal, forward and backward. A large matrix product "
        f"runs at {fixed(matmul.get('tflops_per_s'), 1)} TFLOP/s.",
        "",
        "## Kernels",
        "",
        table(
            "kernel | tokens | ms | TFLOP/s | % of the matrix rate | why not",
            [
                [row["kernel"], row["tokens"], *cells(row, "percent_of_matmul")]
                for row in kernels
            ],
        ),
        "",
        "## The computation of a rank of 8, communication left out",
        "",
        "Of a ring the last rank, which the others wait for. Ideal is the time of the "
        "same products in one causal attention of the rank's own length.",
        "",
        table(
            "order | kernel | tokens of a rank | ms | TFLOP/s | % of ideal | why not",
            [
                [
                    row["what"],
                    row["kernel"],
                    row["tokens"],
                    *cells(row, "percent_of_ideal"),
                ]
                for row in rings
            ],
        ),
        "",
        "Made by `python cfp_test/scripts/attention_gpu.py FILE`, and this page by "
        "`python -m cfp_test.results`; all samples are in the JSON beside it.",
    ]
    return {"page": "\n".join(lines) + "\n"}


def steps(data: Mapping[str, Any]) -> Figures:
    """Figures of `attention_plans_gpu.py`: whole steps, kernels put in or not."""
    ran = [row for row in data["rows"] if row.get("runs", True)]
    compiled = [row for row in data["rows"] if not row.get("runs", True)]
    written = {_step(row): row for row in data["rows"] if not row["kernel"]}

    def cells(row: Mapping[str, Any], *keys: str) -> list[Any]:
        base = written.get(_step(row), {})
        found: list[Any] = []
        for key, digits, unit in (("time_ms", 1, 1.0), ("peak_bytes", 2, 1e9)):
            if key in keys:
                value, before = row.get(key), base.get(key)
                share = value / before - 1.0 if value and before else None
                found.append(None if value is None else fixed(value / unit, digits))
                found.append(None if share is None else f"{share:+.1%}")
        return [*found, " ".join(row.get("failure", "").split()) or None]

    def name(row: Mapping[str, Any]) -> list[Any]:
        return [f"`{row['target']}`", row["preset"], row["kernel"] or "as written"]

    both = [[*name(row), *cells(row, "time_ms", "peak_bytes")] for row in ran]
    lines = [
        "# Whole steps with their attentions replaced",
        "",
        f"One {data['hardware']}, jax {data['jax']}, {data['date']}, commit "
        f"{data['commit']}; `{data['command']}`. The GPU plays one of four (one of "
        "eight below): programs are those of all devices, and collectives do nothing, "
        "so times are of the computation alone. The attentions are found in the "
        "differentiated step, and cuDNN's are put in their places by the script, not "
        "chosen by the planner. Differences are to the row as written.",
        "",
        table(
            "step | sharding | attention | ms | | peak GB | | why not",
            both,
        ),
        "",
        "## Compiled for eight, not run",
        "",
        table(
            "step | sharding | attention | peak GB | | why not",
            [[*name(row), *cells(row, "peak_bytes")] for row in compiled],
        ),
        "",
        "32k tokens and more were not reached: device time was over. All samples are "
        "in the JSON beside this page, which `python -m cfp_test.results` makes.",
    ]
    return {"page": "\n".join(lines) + "\n"}


def _step(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["target"], row["preset"]


def planned(data: Mapping[str, Any]) -> Figures:
    """Plans that `attention_planned.py` saved, with kernels and without."""
    raced = [row for row in data["rows"] if row["part"] == 4]
    long = [row for row in data["rows"] if row["part"] == 8]
    lines = [
        "# Plans with kernels of attention and without",
        "",
        f"One {data['hardware']}, jax {data['jax']}, {data['date']}; "
        f"`{data['command']}`.",
        "",
        "## On one device that plays four",
        "",
        "What `cfp plan --for 4xh200` chooses with attentions as they are written, and "
        "where cuDNN's kernel may take their place. Times are the computation of one "
        "device, which it ran, and the predicted step with its collectives.",
        "",
        table(
            "step | attention | computation ms | predicted ms | GB as compiled",
            [
                [
                    f"`{row['target']}`",
                    ", ".join(sorted({one[1] for one in row["replaced"]}))
                    or "as written",
                    fixed(median(row["programs"][0]["computation_ms"]), 1),
                    fixed(row["predicted_ms"], 1),
                    fixed(row["predicted_bytes"] / 1e9, 2),
                ]
                for row in raced
            ],
        ),
        "",
        "## LLaMA-2-7B on eight",
        "",
        "Rematerialized layer by layer; how much one device may use: "
        f"{fixed(data['memory_bytes'] / 1e9, 1)} GB, or 40. Each row is compiled for "
        "what it needs, and what needs more than it may is over. Strategies by hand "
        "are as the step is written, or with cuDNN's attention and the cross-entropy "
        "in 16 parts where these can be; so are plans, which are chosen by estimates. "
        "Times are estimates; of 8,192 tokens the computation was run.",
        "",
        table(
            "tokens x sequences | how | attention | estimated ms | GB as compiled "
            "| | computation ms | why not",
            [_long(row, data["memory_bytes"]) for row in sorted(long, key=_order)],
        ),
        "",
        "Where no memory is said the compiler ran out of it while it tried kernels, or "
        "no plan fits. The longest sequence follows from two shorter ones, and was "
        "compiled; of the ring it is 1 % over.",
        "",
        "## What plans were estimated to need",
        "",
        "Plans were chosen twice: at first by estimates that left out what segments "
        "need while they run, such as the stacked gradients of a loop's layers, and "
        "again on 2026-11-25, commit 77e798d, by those that count it.",
        "",
        table(
            "tokens x sequences | may use GB | estimated at first | compiled "
            "| estimated since | compiled | of compiled",
            [_estimated(row, data["memory_bytes"]) for row in long if "budget" in row],
        ),
        "",
        "With 40 GB nothing is chosen for 524,288 tokens any more: compiled, the "
        "smallest of eight plans needs 45.2 GB. What compilers do with one sequence of "
        "that length is known for the same plan with another kernel: they turn the "
        "stacked inputs of the layers into another order before the backward pass, and "
        "have both of them, 17 GB each, in memory meanwhile. No estimate has that.",
        "",
        "All rows are in the JSON beside this page, which `python -m cfp_test.results` "
        "makes.",
    ]
    return {"page": "\n".join(lines) + "\n"}


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["tokens"], "budget" in row, not row["kernels"], row.get("by_hand", "")


def _estimated(row: Mapping[str, Any], memory_bytes: int) -> list[Any]:
    before, now = row["planned_before"], row
    cells = [row["name"], fixed((row["budget"] or memory_bytes) / 1e9, 0)]
    for made in (before, now):
        for name in ("predicted_bytes", "peak_bytes"):
            size = made.get(name)
            cells.append(size and fixed(size / 1e9, 1))
    share = now.get("peak_bytes") and now["predicted_bytes"] / now["peak_bytes"]
    return [*cells, share and f"{share:.0%}"]


def pair(data: Mapping[str, Any]) -> Figures:
    """Times of `attention_pair.py`: the same plans with a kernel and without."""
    written = {(r["name"], r["preset"]): r for r in data["rows"] if not r["kernel"]}

    checked = [row for row in data["rows"] if row["what"] == "checked"]

    def cells(row: Mapping[str, Any]) -> list[Any]:
        base = written[row["name"], row["preset"]]
        found = [f"`{row['target']}`", row["preset"], row["kernel"] or "as written"]
        for key, digits, unit in (("time_ms", 1, 1.0), ("peak_bytes", 2, 1e9)):
            share = row[key] / base[key] - 1.0
            found += [fixed(row[key] / unit, digits)]
            found += [f"{share:+.1%}" if row["kernel"] else None]
        far = max(
            abs(a - b) for a, b in zip(row["losses"][:3], base["losses"], strict=False)
        )
        return [*found, f"{row['losses'][0]:.4f}", f"{far:.4f}"]

    lines = [
        "# The same plans with cuDNN's attention and without, on two devices",
        "",
        f"{data['devices']} {data['hardware']} of one host, jax {data['jax']}, "
        f"{data['date']}; `{data['command']}`. Whole steps with collectives: the "
        "median of 12, after 4; all from the same state and batch, and each step from "
        "the state that the last one made.",
        "",
        table(
            "step | plan | attention | ms | | GB as compiled | | first loss "
            "| losses of 3 steps differ by",
            [cells(row) for row in data["rows"] if row["what"] == "timed"],
        ),
        "",
        "## Small steps, checked",
        "",
        "Two steps of a GPT, cuDNN's attention in bfloat16 and the rest in float32, "
        "beside one device that computes all in float32, as `cfp run --check` does it. "
        "Named are the leaves that were further off than was allowed then.",
        "",
        *(line for row in checked for line in _checked(row)),
        "What the check allowed was the last bit of float32. In a bias that begins at "
        "zero AdamW's first update is its gradients' signs: with one of 512 turned it "
        "is off by 0.088. The same step on one CPU device with queries, keys, weights, "
        "values and outputs of its attention rounded to bfloat16 is off by 0.099, "
        "0.088 and 0.013 in three biases, and by less than 0.007 in all other 105 "
        "leaves; what the last bit of bfloat16 in all arguments does to the three is "
        "0.18, 0.20 and 0.12. Since then the check takes that as rounding where a "
        "kernel computes in bfloat16. It was not run again on two devices.",
        "",
        "Data parallel steps and what the planner chooses were not reached.",
        "",
        "All samples are in the JSON beside this page, which "
        "`python -m cfp_test.results` makes.",
    ]
    return {"page": "\n".join(lines) + "\n"}


def _checked(row: Mapping[str, Any]) -> list[str]:
    far = [
        f"- `{path}`: {float(off):.3f}"
        for text in row["failures"]
        for path, off in re.findall(r"path='(.*?)', relative_l2=([\d.e+-]+)", text)
    ]
    head = f"`{row['target']}`, {row['preset']}, {row['kernel']}:"
    return [head, "", *(far or ["- none"]), ""]


def _long(row: Mapping[str, Any], memory_bytes: int) -> list[Any]:
    budget = row.get("budget")
    limit = budget or memory_bytes
    by_hand = row.get("by_hand")
    how = by_hand or f"planned, {fixed((limit) / 1e9, 0)} GB"
    replaced = row.get("replaced", ())
    kernels = sorted({" ".join(r[1:]) for r in replaced if r[1] == "cudnn"})
    peak = row.get("peak_bytes")
    time = row.get("predicted_ms") or row.get("estimated_ms")
    ran = row.get("computation_ms")
    return [
        row["name"],
        how,
        ", ".join(kernels) or (None if row["kernels"] else "as written"),
        time and fixed(time, 0),
        peak and fixed(peak / 1e9, 1),
        peak and ("over" if peak > limit else "fits"),
        ran and fixed(ran, 0),
        " ".join(row.get("failure", "").split())[:120] or None,
    ]
