"""Long sequences of a LLaMA; see `benchmark_ring.sh` and `run_inference.sh`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

# What computes attention, by the names that seed 003's plots would have.
METHODS = ("xla", "flash", "all_gather", "ring", "zigzag", "ulysses", "both")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split(";")[0])
    parser.add_argument("what", choices=("benchmark", "inference"))
    parser.add_argument("--model", choices=("tiny", "7b"), default="tiny")
    parser.add_argument("--layers", type=int, help="fewer layers than the model's")
    parser.add_argument("--checkpoint", type=Path, help="folder of safetensors")
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--implementation", help="of cfp.attention, but for xla")
    parser.add_argument("--lengths", default="64,128", help="tokens, commas between")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--train", action="store_true", help="with gradients")
    parser.add_argument("--alone", action="store_true", help="one layer's attention")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--json", type=Path, help="file for all rows")
    parser.add_argument("--plot", type=Path, help="picture of latency and memory")
    parser.add_argument("--method", choices=METHODS, default="ring")
    parser.add_argument("--prompt", default="1,2,3,4,5", help="tokens, as numbers")
    parser.add_argument("--new", type=int, default=4, help="tokens to add")
    return parser.parse_args(argv)


def main() -> int:
    options = parse()
    os.environ["JAX_PLATFORMS"] = options.platform
    if options.platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={options.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    from cfp_test.ring import lengths  # JAX's platform is settled now.

    if options.what == "inference":
        print(json.dumps(lengths.generate(options)))
        return 0
    rows = []
    for row in lengths.rows(options):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for line in lengths.crossovers(rows):
        print(line)
    if options.plot:
        lengths.plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
