"""All passes over a model's settings, one after the other, as the artifact's scripts.

    python -m cfp_test.bench.passes gpt [--devices N] [--platform cpu|cuda]
        [--settings '24x2 32x2'] [--alpa] [more options of gpt_test.sh]

A setting is batch size x layers. `--alpa` has the cost model choose instead. Each
setting runs in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from cfp import platform
from cfp.cluster.doctor import shows_nvidia

# The artifact's, as far as they are known: GPT's from its example output, LLaMA's and
# the mixture of experts' from its scripts. BERT's are ours.
SETTINGS = {
    "gpt": "24x2 32x2 24x4 32x4",
    "bert": "48x4 96x4",
    "llama": "40x2 80x2 40x4 80x4",
    "moe": "32x4 64x4 96x4 128x4",
}
SIZES = {
    "gpt": "--hidden_size 4096 --num_heads 32 --seq_len 1024 --vocab_size 51200",
    "bert": "--hidden_size 4096 --num_heads 32 --seq_len 512 --vocab_size 30592",
    "llama": "",
    "moe": "",
}
MODULES = {"gpt": "gpt", "bert": "bert", "llama": "llama2", "moe": "moe"}


def found_devices(where: str) -> int:
    """Counts the devices, in a process that then lets go of them."""
    if where == "cpu":
        return platform.DEFAULT_CPU_DEVICES
    code = "import jax; print(len(jax.devices()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": where},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"error: JAX finds no device of {where}:\n{done.stderr}")
    return int(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("model", choices=SETTINGS)
    parser.add_argument("--devices", type=int, help="all there are, if not given")
    parser.add_argument("--platform", choices=platform.PLATFORMS)
    parser.add_argument("--settings", help="batch size x layers, several in quotes")
    parser.add_argument("--alpa", action="store_true", help="the cost model's choice")
    parser.add_argument(
        "--wanted", type=int, help="how many devices the script's name speaks of"
    )
    args, rest = parser.parse_known_args()
    where = args.platform or ("cuda" if shows_nvidia() else "cpu")
    devices = args.devices or found_devices(where)
    if args.wanted and devices != args.wanted:
        print(
            f"The {args.wanted} devices in this script's name are the artifact's; this "
            f"uses the {devices} of {where} that there are.",
            flush=True,
        )
    module = f"cfp_test.{MODULES[args.model]}"
    if args.alpa:
        module = "alpa_test.passes"
        rest = ["--model", args.model, *rest]
    failed = False
    for setting in (args.settings or SETTINGS[args.model]).split():
        batch, _, layers = setting.partition("x")
        words = [*SIZES[args.model].split(), "--batch_size", batch]
        words += ["--num_layer", layers, "--device_num", str(devices)]
        words += ["--platform", where, "--mode", "all", *rest]
        done = subprocess.run([sys.executable, "-m", module, *words], check=False)
        if done.returncode == 130:
            return 130
        failed = failed or done.returncode != 0
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
