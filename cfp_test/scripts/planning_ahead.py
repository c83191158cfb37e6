"""Times plans for clusters that are not here, and lists their choices.

    python cfp_test/scripts/planning_ahead.py --json docs/results/FILE.json
        [--models gpt,moe] [--layers 4,48] [--for 4xh200,...]

Each plan is made in a process of its own, from the command line to the saved plan. The
page beside the JSON is made from it.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SIZES = {
    "gpt": "--hidden 4096 --heads 32 --batch 24 --seq 1024",
    "moe": "--batch 64",
    "bert": "",
    "llama": "",
}


def planned(model: str, layers: int, cluster: str) -> dict:
    """One plan, and what making it took."""
    words = [model, "--layers", str(layers), *_SIZES[model].split()]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    how = ("--json", "-q", "--workdir")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "cfp",
                "plan",
                *words,
                "--for",
                cluster,
                *how,
                folder,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {
        "target": words,
        "layers": layers,
        "cluster": cluster,
        "seconds": round(seconds, 1),
        "processor_seconds": round(cpu, 1),
    }
    if done.returncode:
        return row | {"failure": done.stderr[-500:]}
    plan = json.loads(done.stdout)
    return row | {
        "winner": plan["winner"],
        "rung": plan["rung"],
        "estimated_ms": plan["predicted_ms"],
        "estimated_bytes": plan["predicted_bytes"],
        "search": plan["search"],
        "others_ms": {r["name"]: r["predicted_ms"] for r in plan["race"]},
    }


def page(data: dict) -> str:
    """The rows as Markdown."""
    lines = [
        "# Planning without a GPU: seconds",
        "",
        f"Two shared processor cores, {data['python']}, jax {data['jax']}, November "
        "2026. Each plan in a process of its own, from the command line to the plan: "
        "wall-clock seconds, and those of processors, which do not count what else the "
        "machine did. Choices are by estimates; nothing was compiled or run. Made by "
        "`python cfp_test/scripts/planning_ahead.py --json FILE`. "
        "[JSON](planning_ahead_cpu_202611.json)",
        "",
        "| target | cluster | wall s | processor s | estimated ms | estimated GiB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in data["rows"]:
        if "failure" in row:
            figures = [row["failure"].strip().splitlines()[0], ""]
        else:
            size = row["estimated_bytes"]
            gib = "-" if size is None else f"{size / 2**30:.1f}"
            figures = [f"{row['estimated_ms']:.1f}", gib]
        cells = [
            " ".join(row["target"]),
            row["cluster"],
            f"{row['seconds']:.1f}",
            f"{row['processor_seconds']:.1f}",
            *figures,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--models", default=",".join(_SIZES))
    parser.add_argument("--layers", default="4,48")
    parser.add_argument("--for", dest="clusters", default="8xh200")
    options = parser.parse_args()
    import jax

    data = {
        "python": f"Python {sys.version.split()[0]}",
        "jax": jax.__version__,
        "cores": os.cpu_count(),
        "rows": [],
    }
    for cluster in options.clusters.split(","):
        for layers in map(int, options.layers.split(",")):
            for model in options.models.split(","):
                data["rows"].append(planned(model, layers, cluster))
                print(data["rows"][-1], flush=True)
                options.json.write_text(json.dumps(data, indent=1) + "\n")
                options.json.with_suffix(".md").write_text(page(data))


if __name__ == "__main__":
    main()
