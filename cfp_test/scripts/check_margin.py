"""Measures a check's leaves in units of what rounding does on one device.

    python cfp_test/scripts/check_margin.py [--seeds 20] [--preset fully_sharded]
        [--out FILE.json] gpt --layers 2 --hidden 64 ...

``cfp run --check`` lets a leaf be off by ten times what the last bit of the arguments
does to it on one device (a root mean square of three tries). This runs the first step
from many random arguments, under a preset and on one device, and says of all leaves how
large that ratio is, and of the largest what the leaf is.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

import cfp
from cfp.checking.check import (
    FULL_TOLERANCE,
    MOST_ALLOWED,
    ROUNDING_MARGIN,
    Check,
)
from cfp.checking.reference import both_sides
from cfp.targets import resolve
from cfp_test.support.checking import make_mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--preset", default="fully_sharded")
    parser.add_argument("--cache", default=".cfp-check")
    parser.add_argument("--out", type=Path)
    options, words = parser.parse_known_args()
    target = resolve(words[0], words[1:])
    plan = cfp.plan(
        target.step,
        *target.args,
        mesh=make_mesh((("x", 4),)),
        preset=options.preset,
        cache_dir=options.cache,
        settings=cfp.PlannerSettings(race=False),
    )
    check = Check(*both_sides(plan), {0: 0})
    rows = []
    for seed in range(options.seeds):
        check.start(list(target.make_args(plan.in_shardings, seed)))
        found = check.step()
        for d in found.differences:
            noise = found.rounding[d.path]
            rows.append((d.relative_l2, noise, d.path, seed))
    ratios = np.array([far / noise for far, noise, *_ in rows if noise > 0])
    far = [
        {"path": path, "seed": seed, "relative_l2": off, "rounding": noise}
        for off, noise, path, seed in rows
        if off > FULL_TOLERANCE and noise > 0 and ROUNDING_MARGIN * noise < MOST_ALLOWED
    ]
    data = {
        "target": " ".join(words),
        "preset": options.preset,
        "jax": jax.__version__,
        "seeds": options.seeds,
        "leaves": len(ratios),
        "quantiles": {q: float(np.quantile(ratios, q)) for q in (0.5, 0.9, 0.99, 1.0)},
        "above_margin": int((ratios > ROUNDING_MARGIN).sum()),
        "beyond_tolerance": sorted(far, key=lambda row: -row["relative_l2"])[:20],
    }
    text = json.dumps(data, indent=1)
    print(text)
    if options.out:
        options.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
