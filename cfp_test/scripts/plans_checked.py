"""Plans steps at their defaults, checks them, and compares what is exported of them.

    python -m cfp_test.scripts.plans_checked FOLDER [--models gpt moe] [--devices 2]
    python -m cfp_test.scripts.plans_checked FOLDER --platform cpu --tiny

For each model of the suite `layers`: ``cfp plan``, then ``cfp run --check`` of that
plan, then for some the exported module beside the plan: collectives and kernels of both
compiled programs, and the largest relative L2 distance between their results of two
steps. FOLDER/plans_checked.json is written after each; plans are beside it,
and one that is there already is not planned again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cfp import platform
from cfp_test.bench.configs import SUITES, small
from cfp_test.results.pages import Figures, fixed, table
from cfp_test.scripts.rows import Rows

MODELS = ("gpt", "moe", "llama", "bert")
EXPORTED = ("gpt", "moe")
STEPS = 2
CUDNN, CUBLAS = "cudnn", "__cublas$lt$matmul"
_CALLED = re.compile(r'custom_call_target="([^"]+)"')


def target_of(model: str, tiny: bool, devices: int) -> list[str]:
    """Words of the command line that name a model at the suite's sizes."""
    sizes = {"dtype": "bfloat16", **SUITES["layers"][model]}
    if tiny:
        sizes = small(model, {"layers": 2}, devices)
    given = {name: size for name, size in sizes.items() if name != "learning_rate"}
    return [
        model,
        *(word for n, size in given.items() for word in (f"--{n}", f"{size}")),
    ]


def command(words: Sequence[str], log: Path) -> tuple[int, float, str]:
    """Runs a command of cfp: its exit code, seconds, and what it printed."""
    started = time.perf_counter()
    with log.open("w") as errors:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
        )
    return done.returncode, round(time.perf_counter() - started, 1), done.stdout


def checked(target: Sequence[str], plan: Path, where: Sequence[str]) -> dict[str, Any]:
    """A row: seconds of planning, and what the check of the plan found."""
    row: dict[str, Any] = {"planning_s": None, "planning_exit": 0}
    if not plan.exists():
        words = ["cfp", "plan", *target, *where, "--json", "-o", str(plan)]
        code, seconds, _ = command(words, plan.with_suffix(".plan.txt"))
        row |= {"planning_s": seconds, "planning_exit": code}
        if code:
            return row
    words = ["cfp", "run", *target, "--plan", str(plan)]
    words += ["--check", "--steps", "3", "--json"]
    code, seconds, text = command(words, plan.with_suffix(".check.txt"))
    row |= {"check_s": seconds, "check_exit": code}
    if text:
        found = json.loads(text)
        wanted = ("plan", "median_ms", "passed", "tolerance", "largest_difference")
        wanted += ("checked_against", "failures", "compared_by_norm_alone")
        row |= {name: found.get(name) for name in wanted}
    return row


def exported(words: Sequence[str], file: Path) -> dict[str, Any]:
    """Compares a saved plan with the module that is exported of it, as both run."""
    import jax

    import cfp
    from cfp.checking.check import compare
    from cfp.profiling.hlo import collectives_in
    from cfp.targets import resolve

    target = resolve(words[0], words[1:])
    plan = cfp.Plan.load(file)
    bound = plan.bind(target.step, *target.args, donate_argnums=target.donate)
    module = file.with_suffix(".py")
    bound.export_python(module)
    # As where cfp is not installed: the module is all that there is of the plan.
    found: dict[str, Any] = {"__name__": "exported"}
    exec(compile(module.read_text(), "exported", "exec"), found)
    ours = bound.compile(target.step, *target.args)
    theirs = found["shard"](target.step, *target.args, mesh=bound.mesh)
    texts = {"plan": ours.as_text(), "exported": theirs.compiled.as_text()}
    row: dict[str, Any] = {}
    for name, text in texts.items():
        row[f"{name}_collectives"] = sorted(str(one) for one in collectives_in(text))
        row[f"{name}_kernels"] = dict(Counter(_CALLED.findall(text)))
    results = []
    for run in (ours, theirs):
        state, *rest = target.make_args(bound.in_shardings, 0)
        for _ in range(STEPS):
            state, metrics = run(state, *rest)
        results.append(jax.block_until_ready((state, metrics)))
    worst = compare(*results)[0]
    row["largest_difference"] = {"path": worst.path, "relative_l2": worst.relative_l2}
    row["module_bytes"] = module.stat().st_size
    return row


def figures(data: Mapping[str, Any]) -> Figures:
    """Rows of a page, and what it says of the module."""
    rows, products = [], []
    for row in data["rows"]:
        other = row.get("exported") or {}
        checks = {0: "passes", 1: "fails"}.get(row["check_exit"], "did not run")
        kernels = [
            sum(
                n
                for name, n in other.get(f"{which}_kernels", {}).items()
                if CUDNN in name
            )
            for which in ("plan", "exported")
        ]
        same = other.get("plan_collectives") == other.get("exported_collectives")
        rows.append(
            [
                row["model"],
                "" if row["planning_s"] is None else fixed(row["planning_s"], 0),
                checks,
                row.get("checked_against"),
                _distance(row.get("largest_difference")),
                f"{len(other['plan_collectives'])}, {'the same' if same else 'others'}"
                if other
                else "",
                f"{kernels[0]} and {kernels[1]}" if other else "",
                _distance(other.get("largest_difference")),
            ]
        )
        if other:
            both = (other[f"{which}_kernels"] for which in ("plan", "exported"))
            counts = [one.get(CUBLAS, 0) for one in both]
            products.append(f"{counts[0]} in the plan and {counts[1]} in the module")
    head = (
        "model | planned in s | check | against | off by at most | collectives of the "
        "exported module | cuDNN's kernels in both | results off by at most"
    )
    return {
        "rows": table(head, rows),
        "products": ", ".join(products),
        "jax": data["jax"],
        "date": data["date"],
        "commits": ", ".join(dict.fromkeys(row["commit"] for row in data["rows"])),
    }


def _distance(worst: Mapping[str, Any] | None) -> str:
    if not worst:
        return ""
    off = worst["relative_l2"]
    return f"{'not finite' if off is None else f'{off:.1e}'} in {worst['path']}"


def main() -> None:
    given = _parser().parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.plan:
        cpu = "cpu" if given.platform == "cpu" else None
        platform.select(cpu, (("x", given.devices),))
        words = target_of(given.models[0], given.tiny, given.devices)
        print(json.dumps(exported(words, given.plan)))
        return
    until = time.monotonic() + given.seconds
    where = ["--devices", str(given.devices)]
    if given.platform == "cpu":
        where += ["--platform", "cpu"]
    head = {"devices": given.devices, "tiny": given.tiny}
    about = {"date": datetime.now(UTC).date().isoformat()}
    rows = Rows(given.folder / "plans_checked.json", head, about)
    for model in given.models:
        if rows.find(model=model) is not None or time.monotonic() > until:
            continue
        words, plan = target_of(model, given.tiny, given.devices), given.folder / model
        plan = plan.with_suffix(".json")
        row = {"model": model, **checked(words, plan, where)}
        rows.add(row)
        if model in given.export and plan.exists():
            again = ["cfp_test.scripts.plans_checked", *sys.argv[1:]]
            again += ["--models", model, "--plan", str(plan)]
            code, _, text = command(again, plan.with_suffix(".export.txt"))
            row["export_exit"] = code
            row["exported"] = json.loads(text.splitlines()[-1]) if text else None
            rows.rows.pop()  # It was kept, too, while the module was compared.
            rows.add(row)
        print(json.dumps(row), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--export", nargs="*", choices=MODELS, default=EXPORTED)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=540, help="none begins later")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
