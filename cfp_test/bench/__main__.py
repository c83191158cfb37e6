"""Runs a benchmark: ``python -m cfp_test.bench NAME [OPTIONS]``.

``--list`` names all; ``NAME --help`` lists the options of one. docs/benchmarks.md says
how long each takes, on which devices, and which page it makes.
"""

from __future__ import annotations

import runpy
import sys

# The module of each, the words that come first, and a line about it.
BENCHMARKS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "readme": (
        "cfp_test.bench.readme",
        (),
        "the README's table; two GPUs",
    ),
    "side_by_side": (
        "cfp_test.bench.side_by_side",
        (),
        "plans beside presets, shardings by hand, a cost model and PyTorch; two GPUs",
    ),
    "one_gpu": (
        "cfp_test.bench.one_gpu",
        (),
        "plans for one GPU beside jax.jit",
    ),
    "fp8_training": (
        "cfp_test.bench.fp8_training",
        (),
        "a GPT trained in bfloat16 and in FP8; one GPU",
    ),
    "full_model": (
        "cfp_test.bench.full_model",
        (),
        "a whole model, planned and trained",
    ),
    "planning": (
        "cfp_test.bench.planning",
        (),
        "seconds of planning, by part",
    ),
    "operators": ("cfp.operators", (), "operators of several libraries"),
    "attention": (
        "cfp_test.bench.attention",
        (),
        "kernels of attention; one GPU",
    ),
    "scatters": (
        "cfp_test.bench.scatters",
        (),
        "gradients that JAX scatters; one GPU",
    ),
    "seeds": (
        "cfp_test.bench.seeds",
        (),
        "the shell scripts of the papers' artifacts",
    ),
    "soak": (
        "cfp_test.bench.soak",
        (),
        "plans, interrupts and kills in a loop; CPUs",
    ),
    "calibrate": (
        "cfp",
        ("profile", "--curves"),
        "rates of devices and times of collectives",
    ),
    "pages": (
        "cfp_test.bench.pages",
        (),
        "writes the tables of docs/results from their JSON",
    ),
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--list"
    if name in ("--list", "--help", "-h"):
        print("python -m cfp_test.bench NAME [OPTIONS]\n")
        for one, (_, _, about) in BENCHMARKS.items():
            print(f"  {one:14}{about}")
        return
    if name not in BENCHMARKS:
        sys.exit(f"no benchmark {name!r}; try: python -m cfp_test.bench --list")
    module, words, _ = BENCHMARKS[name]
    sys.argv[:] = [module, *words, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
