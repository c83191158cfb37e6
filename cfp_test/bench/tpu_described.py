"""Plans for TPU slices by estimates, the best few compiled by XLA:TPU.

    python -m cfp_test.bench.tpu_described --out FILE [--only NAME ...] [--no-compile]

Takes an environment with libtpu, and no TPU. Beside each plan stands what arithmetic
says of four presets: products at the published rate, and what a device sends by the
published rate of its links; nothing else, and nothing overlaps.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax

import cfp
from cfp.context import PlannerSettings
from cfp.cost.described import DescribedMesh
from cfp.errors import CfpError
from cfp.targets import resolve

GPT = "gpt --scan --layers 4 --hidden 2048 --heads 16 --seq 1024 --vocab 32768"
LLAMA = "llama --scan --remat --seq 2048"
MOE = "moe --scan --layers 4 --hidden 1024 --seq 512"
# By name: the target, and sequences of each device. The last two are for 16 GB: one
# fits if it computes again, one cannot.
TARGETS = {
    "gpt": (GPT, 16),
    "llama-7b": (LLAMA, 2),
    "moe": (MOE, 32),
    "gpt-tight": (GPT.replace(" --scan", ""), 48),
    "llama-7b-too-large": (LLAMA, 32),
}
SLICES = ("v5e:2x4", "v5p:2x2x4", "v6e:4x4", "v5e:16x16")


def words_of(name: str, devices: int) -> list[str]:
    """The command line of a target for so many devices."""
    text, each = TARGETS[name]
    return f"{text} --batch {each * devices} --dtype bfloat16".split()


def by_arithmetic(mesh: DescribedMesh, shape: dict[str, int]) -> dict[str, float]:
    """Milliseconds of a transformer's step under four presets on one axis."""
    kind, cluster = mesh.cluster.kind, mesh.cluster
    n = cluster.count
    layer = 12 * shape["hidden"] ** 2
    state = shape["layers"] * layer + 2 * shape["vocab"] * shape["hidden"]
    tokens = shape["batch"] * shape["seq"]
    products = 6 * (state - shape["vocab"] * shape["hidden"]) * tokens
    products += 12 * shape["layers"] * shape["hidden"] * shape["seq"] * tokens
    compute = products / n / kind.specified("bfloat16_tflop_per_s") / 1e9
    assert kind.link_gb_per_s is not None
    rings = zip(cluster.torus, cluster.rings, strict=True)
    links = sum(2 if ring else 1 for size, ring in rings if size > 1)
    once = (n - 1) / n / (links * kind.link_gb_per_s.value * 1e6)
    activations = 2 * tokens * shape["hidden"]
    # Parameters and gradients in float32; gathered in bfloat16, forward and backward.
    return {
        "data_parallel": compute + 2 * 4 * state * once,
        "fully_sharded": compute + (2 * 2 + 4) * state * once,
        # Of each layer two sums of activations forward, and two backward.
        "tensor_parallel": compute + shape["layers"] * 4 * 2 * activations * once,
        "tensor_sequence_parallel": compute
        + shape["layers"] * 4 * 2 * activations * once,
    }


def plan(name: str, text: str, compiled: bool, folder: Path) -> dict[str, Any]:
    """Plans a target for a slice, on one axis; the row of the results."""
    mesh = cfp.described(text)
    words = words_of(name, mesh.cluster.count)
    target = resolve(words[0], words[1:])
    row: dict[str, Any] = {"name": name, "target": " ".join(words), "slice": text}
    started = time.perf_counter()
    try:
        made = cfp.plan(
            target.step,
            *target.args,
            mesh=mesh,
            donate_argnums=target.donate,
            static_argnums=target.static,
            cache_dir=folder,
            quiet=True,
            settings=PlannerSettings(compile=compiled),
        )
    except CfpError as error:
        return {**row, "seconds": time.perf_counter() - started, "error": str(error)}
    made.save(folder / f"{name}-{text.replace(':', '-')}.json")
    row |= {
        "seconds": round(time.perf_counter() - started, 1),
        "plan": made.winner,
        "estimate_ms": made.predicted_ms,
        "estimate_bytes": made.predicted_bytes,
        "compiled_bytes": made.peak_bytes,
        "rows": [
            {
                "name": one.name,
                "estimate_ms": one.predicted_ms,
                "bytes": one.peak_bytes,
                "note": one.note,
            }
            for one in made.race
        ],
    }
    return row


def main() -> None:
    """Plans all, and writes each row as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[*TARGETS])
    parser.add_argument("--slices", nargs="*", default=[*SLICES])
    parser.add_argument("--no-compile", action="store_true")
    given = parser.parse_args()
    folder = given.out.parent / "tpu_described"
    folder.mkdir(parents=True, exist_ok=True)
    found = json.loads(given.out.read_text()) if given.out.exists() else {"rows": []}
    found["jax"] = jax.__version__
    for name in given.only:
        for text in given.slices:
            row = plan(name, text, not given.no_compile, folder)
            mesh = cfp.described(text)
            if name == "gpt":
                words = words_of(name, mesh.cluster.count)
                keys = ("layers", "hidden", "seq", "vocab", "batch")
                shape = {k: int(words[words.index(f"--{k}") + 1]) for k in keys}
                row["arithmetic_ms"] = by_arithmetic(mesh, shape)
            found["rows"].append(row)
            given.out.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
