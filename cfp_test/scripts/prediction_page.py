"""Makes a page and a scatter plot of what cfp_test/scripts/prediction.py measured.

python cfp_test/scripts/prediction_page.py FILE.json [FILE.json ...]
    --page docs/results/NAME.md --plot docs/pictures/NAME.png
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
from scipy.stats import spearmanr

matplotlib.use("Agg")
from matplotlib import pyplot


def errors(plans: list[dict], predicted: str, measured: str) -> np.ndarray:
    """Relative errors of all plans that have both numbers."""
    pairs = [(p[predicted], p[measured]) for p in plans if p.get(measured)]
    return np.array([guess / found - 1 for guess, found in pairs])


def title(run: dict) -> str:
    """Names the measurements and their devices, on a line."""
    parts = run["environment"]
    links = "NCCL_P2P_DISABLE=1" if "P2P_DISABLE=1" in parts["nccl"] else "NVLink"
    devices = f"{parts['devices']} x {parts['device_kind']}"
    return f"{' '.join(run['target'])}: {devices}, {links}"


def summary(run: dict) -> list[str]:
    """The figures of one run, as Markdown."""
    plans = [p for p in run["plans"] if p.get("measured_ms")]
    off = np.abs(errors(plans, "predicted_ms", "measured_ms"))
    memory = errors(plans, "predicted_bytes", "compiled_bytes")
    marks = errors(plans, "compiled_bytes", "high_water_bytes")
    rank = spearmanr(
        [p["predicted_ms"] for p in plans], [p["measured_ms"] for p in plans]
    ).statistic
    price = run["price"]
    lines = [
        f"## {title(run)}",
        "",
        f"`python {run['command']}`, {run['date']}, "
        + ", ".join(f"{k} {v}" for k, v in run["environment"].items() if "version" in k)
        + f", {run['environment']['nccl']}",
        "",
        f"- {len(plans)} plans: error of the step time {np.median(off):.1%} in the "
        f"median, {np.quantile(off, 0.9):.1%} at the 90th percentile; rank correlation "
        f"{rank:.3f}",
        f"- memory: predicted against compiled {memory.min():+.1%} to "
        f"{memory.max():+.1%}; compiled against the device's high-water mark "
        f"{marks.min():+.1%} to {marks.max():+.1%}",
        f"- price: {price['strategies']} strategies by {price['jobs']} programs, "
        f"{price['failed']} failed, {price['profile_seconds']:.0f} s in all (builds, "
        f"side by side ones added up, {price['build_seconds']:.0f} s; runs "
        f"{price['run_seconds']:.0f} s); again: {price['again_measured']} measured, "
        f"{price['again_seconds']:.1f} s",
        "",
        "| plan | predicted ms | measured ms | ratio | predicted GiB | compiled GiB | "
        "high water GiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for p in plans:
        mark = p["high_water_bytes"]
        lines.append(
            f"| {p['name']} | {p['predicted_ms']:.2f} | {p['measured_ms']:.2f} | "
            f"{p['predicted_ms'] / p['measured_ms']:.3f} | "
            f"{p['predicted_bytes'] / 2**30:.2f} | {p['compiled_bytes'] / 2**30:.2f} | "
            f"{f'{mark / 2**30:.2f}' if mark else '-'} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--note", default="", help="a paragraph for the page's top")
    options = parser.parse_args()
    runs = [json.loads(file.read_text()) for file in options.files]
    text = "\n".join(line for run in runs for line in summary(run))
    if options.page:
        top = "# Predicted and measured step times\n\n"
        note = f"{options.note}\n\n" if options.note else ""
        options.page.write_text(top + note + text)
    else:
        print(text)
    if not options.plot:
        return
    figure, axis = pyplot.subplots(figsize=(5.6, 5.2))
    ends = []
    for run in runs:
        plans = [p for p in run["plans"] if p.get("measured_ms")]
        x = [p["measured_ms"] for p in plans]
        y = [p["predicted_ms"] for p in plans]
        ends += [*x, *y]
        axis.scatter(
            x, y, s=16, label=f"{run['target'][0]}, {title(run).rpartition(', ')[2]}"
        )
    low, high = min(ends) * 0.95, max(ends) * 1.05
    axis.plot([low, high], [low, high], color="black", linewidth=0.8)
    axis.fill_between(
        [low, high], [low * 0.9, high * 0.9], [low * 1.1, high * 1.1], alpha=0.12
    )
    axis.set_xlabel("measured ms a step")
    axis.set_ylabel("predicted ms a step")
    axis.legend()
    figure.tight_layout()
    figure.savefig(options.plot, dpi=110)


if __name__ == "__main__":
    main()
