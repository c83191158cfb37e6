"""Plans of one GPU that plays four, by two versions of cfp: are they the same?

    python cfp_test/scripts/same_plans_gpu.py OUT.json before=FOLDER after=FOLDER
        [--models MoE,GPT] [--seconds 400] [--platform cpu --tiny]

Each FOLDER has a package `cfp`. GPT and MoE are planned for four devices of the GPU's
kind, without a budget and within shares of what the first of these plans needs, by each
version in a process of its own. Nothing is decided by a clock: planning has no end, and
what a computation took is timed once, by the version that met it first, so that the
same programs have the same times in both. Everything else of the store is left out for
the second version, which builds and decides anew.

OUT.json has a row for each plan, and is written after each model and version; what is
in it is not planned again, and nothing is begun after the seconds. On a CPU virtual
devices stand in, to try it out.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODELS = {
    "GPT": "gpt --layers 2 --hidden 4096 --heads 32 --batch 24 --seq 1024",
    "MoE": "moe --layers 2 --batch 64",
}
_TINY = "--layers 2 --hidden 64 --heads 4 --seq 32 --vocab 128 --batch 16"
TINY_MODELS = {
    "GPT": f"gpt {_TINY}",
    "MoE": f"moe {_TINY} --experts 4 --expert_group_size 128",
}
SHARES = (None, 0.8, 0.6)
# Of one model and version, after which the next is begun.
_MOST_SECONDS = 290
_COMPUTATION = "computation alone"
_KIND = {"H100": "4xh100", "H200": "4xh200"}


def cluster() -> str:
    """Four of this machine's GPU, which JAX may not be asked for before it plays."""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    name = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return next(text for part, text in _KIND.items() if part in name)


def child(target: str, on_cpu: bool, store: Path, out: Path) -> None:
    """Plans a model with the package that is found first, without and with a budget."""
    import cfp
    from cfp import planner_settings

    # Earlier versions had one class of settings.
    settings_type = getattr(planner_settings, "DetailedSettings", cfp.PlannerSettings)
    from cfp.errors import CfpError
    from cfp.settings import ConstraintLevel
    from cfp.targets import resolve

    if on_cpu:
        from cfp import platform
        from cfp.program.trace import planning_mesh

        platform.select("cpu", (("x", 4),))
        described = cfp.described("4xh200")
        here = planning_mesh(platform.make_mesh(described.axes))
        mesh = dataclasses.replace(described, stand_in=here, runs=True)
    else:
        mesh = cfp.described(cluster()).on_one_device()
    words = target.split()
    made = resolve(words[0], words[1:])
    # `extents` in earlier versions.
    names = {one.name for one in dataclasses.fields(settings_type)}
    [levels] = names & {"constraint_levels", "extents"}
    settings = settings_type(
        **{levels: (ConstraintLevel.EVERYTHING,)},
        seconds=1e6,
        plans=2,
        compiler_options={},
        progress=lambda event: print(f"    {event}", flush=True),
    )
    rows: list[dict[str, Any]] = []
    needs = 0
    for share in SHARES:
        begun = time.perf_counter()
        row: dict[str, Any] = {"share": share, "package": str(Path(cfp.__file__))}
        budget = None if share is None else round(share * needs)
        try:
            plan = cfp.plan(
                made.step,
                *made.args,
                mesh=mesh,
                static_argnums=made.static,
                donate_argnums=made.donate,
                memory_budget=budget,
                cache_dir=store,
                settings=settings,
            )
            needs = needs or plan.predicted_bytes or 0
            row |= data_of(plan)
        except CfpError as error:
            row["failure"] = f"{type(error).__name__}: {error}"
        row |= {"budget": budget, "seconds": round(time.perf_counter() - begun, 1)}
        rows.append(row)
        out.write_text(json.dumps(rows))


def data_of(plan: Any) -> dict[str, Any]:
    """Returns the parts of a plan that are compared."""
    decided = json.loads(plan.to_json())
    parts = ("arguments", "output_specs", "constraints", "recompute", "options")
    text = json.dumps({part: decided[part] for part in parts}, sort_keys=True)
    return {
        "winner": plan.winner,
        "digest": hashlib.sha256(text.encode()).hexdigest()[:12],
        "predicted_ms": plan.predicted_ms,
        "predicted_bytes": plan.predicted_bytes,
        "rung": plan.rung,
        "race": [[r.name, r.predicted_ms, r.peak_bytes, r.note] for r in plan.race],
    }


def page(data: dict[str, Any], name: str) -> str:
    """Both versions' rows beside each other, as Markdown."""
    rows = {(row["model"], row["share"], row["side"]): row for row in data["rows"]}
    lines = [
        "# The same plans, before and after, on one GPU that plays four",
        "",
        f"{data['device']}, jax {data['jax']}, November 2026; cfp of "
        f"{data['commits']['before']} and of {data['commits']['after']}. "
        f"{'; '.join(f'{name}: `{target}`' for name, target in MODELS.items())}; "
        "without a budget, and within shares of what the first of these plans needs. "
        "Made by `python cfp_test/scripts/same_plans_gpu.py`. "
        f"[JSON]({name}.json)",
        "",
        "| model | budget | decides the same | chosen | predicted ms | memory GB | "
        "seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, share in dict.fromkeys(key[:2] for key in rows):
        sides = [rows.get((model, share, side)) for side in ("before", "after")]
        found = [row for row in sides if row]
        same = "not ended" if len(found) < 2 else "yes" if _alike(*found) else "no"
        cells = [
            *(model, "none" if share is None else f"{share:.0%}", same),
            " / ".join(dict.fromkeys(row.get("winner", "none fits") for row in found)),
            _both(found, "predicted_ms", 1.0),
            _both(found, "predicted_bytes", 1e9)
            or " / ".join(f"{_needs(row)} needed" for row in found),
            _both(found, "seconds", 1.0),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *data["notes"], ""])


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one.get("digest"), _needs(one)) == (other.get("digest"), _needs(other))


def _needs(row: dict[str, Any]) -> str:
    """Returns the memory of the smallest, where nothing fits."""
    return row.get("failure", "").split(", needs ")[-1].split(" on")[0]


def _both(rows: list[dict[str, Any]], name: str, unit: float) -> str:
    return " / ".join(f"{row[name] / unit:.2f}" for row in rows if name in row)


def keep_computations(folder: Path) -> None:
    """Leaves in a store what computations took, and nothing that was decided by."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from cfp.profiling.store import ProfileStore, store_path

    path = store_path(folder)
    with ProfileStore(path) as store:
        kept = [
            record
            for record in store.records()
            if dict(record.parts).get("what", "").startswith(_COMPUTATION)
        ]
    for file in filter(Path.is_file, path.parent.glob(f"{path.name}*")):
        file.unlink()
    with ProfileStore(path) as store:
        store.put_all(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("sides", nargs="*", help="NAME=FOLDER")
    parser.add_argument("--models", default=",".join(MODELS), help="in this order")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    on_cpu = options.platform == "cpu"
    if options.child:
        child(options.child, on_cpu, options.store, options.out)
        return
    end = time.monotonic() + options.seconds
    sides = [text.partition("=")[::2] for text in options.sides]
    data = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    data["device"] = "virtual CPU devices" if on_cpu else cluster()
    work = options.out.with_suffix(".stores")
    targets = TINY_MODELS if options.tiny else MODELS
    for model in options.models.split(","):
        target, store = targets[model], work / model
        for name, folder in sides:
            if any((r["model"], r["side"]) == (model, name) for r in data["rows"]):
                continue
            left = end - time.monotonic()
            if left < 20:
                break
            if store.exists():
                keep_computations(store)
            part = options.out.with_suffix(f".{model}.{name}.json")
            words = [sys.executable, __file__, str(part), "--child", target]
            words += ["--store", str(store), "--platform", options.platform]
            print(f"{model}, {name}", flush=True)
            run(words, folder, min(left, _MOST_SECONDS))
            if part.exists():
                rows = json.loads(part.read_text())
                data["rows"] += [{"model": model, "side": name, **r} for r in rows]
                options.out.write_text(json.dumps(data, indent=1) + "\n")
                part.unlink()
    shutil.rmtree(work, ignore_errors=True)
    for row in data["rows"]:
        print({key: row.get(key) for key in row if key != "race"}, flush=True)


def run(words: list[str], folder: str, seconds: float) -> None:
    """A process with a folder's package, ended when the time is over."""
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    try:
        subprocess.run(words, check=False, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"ended after {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
