"""Ulysses in five ways, of a small decoder; see `run_ulysses.sh`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

MODES = ("eager", "compile", "deepcompile", "ringattn", "auto")
ALL = "all"
LEARNING_RATE = 1e-2


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split(";")[0])
    parser.add_argument("seq", help="tokens of a sequence; several with commas")
    known = (*MODES, ALL)
    parser.add_argument("mode", nargs="*", choices=known, default=["compile"])
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
    parser.add_argument("--no_save", action="store_true", help="time the step alone")
    parser.add_argument("--json", type=Path, help="file for rows; those in it stay")
    parser.add_argument("--seconds", type=float, help="after which no run begins")
    return parser.parse_args(argv)


def main() -> int:
    options = parse()
    os.environ["JAX_PLATFORMS"] = options.platform
    if options.dtype == "float32":  # GPUs would multiply with fewer bits.
        os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    devices = options.sp * options.dp
    if options.platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    from cfp_test.ulysses import run  # JAX's platform is settled now.

    modes = MODES if ALL in options.mode else options.mode
    lengths = [int(length) for length in options.seq.split(",")]
    wanted = [
        argparse.Namespace(**{**vars(options), "seq": length, "mode": mode})
        for length in lengths
        for mode in modes
    ]
    # One length's folders are named by mode alone.
    by_length = len(lengths) > 1
    return run.run_all(wanted, options.json, options.seconds, by_length=by_length)


def row_of(options: argparse.Namespace) -> dict[str, Any]:
    """Options of a run."""
    names = ("mode", "seq", "sp", "dp", "layers", "hidden", "heads", "batch", "dtype")
    return {name: getattr(options, name) for name in names}


if __name__ == "__main__":
    raise SystemExit(main())
