"""Ulysses in five ways, of a small decoder; see `run_ulysses.sh`."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

MODES = ("eager", "compile", "deepcompile", "ringattn", "auto")
LEARNING_RATE = 1e-2


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split(";")[0])
    parser.add_argument("seq", type=int, help="tokens of a sequence")
    parser.add_argument("mode", choices=MODES, nargs="?", default="compile")
    parser.add_argument("--sp", type=int, default=2, help="devices of a sequence")
    parser.add_argument("--dp", type=int, default=1, help="copies that share a batch")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv_heads", type=int, default=None)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--implementation", help="of cfp.attention")
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dump", type=Path, default=Path("qkv"))
    return parser.parse_args(argv)


def main() -> int:
    options = parse()
    os.environ["JAX_PLATFORMS"] = options.platform
    devices = options.sp * options.dp
    if options.platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    from cfp_test.ulysses import run  # JAX's platform is settled now.

    folder = options.dump / options.mode
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    row = run.run(options, folder)
    row["total_s"] = round(time.perf_counter() - start, 2)
    (folder / "row.json").write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps(row))
    return 0


def row_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a run was asked for."""
    names = ("mode", "seq", "sp", "dp", "layers", "hidden", "heads", "batch", "dtype")
    return {name: getattr(options, name) for name in names}


if __name__ == "__main__":
    raise SystemExit(main())
