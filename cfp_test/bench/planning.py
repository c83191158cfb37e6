"""Plans models from an empty store, and notes the seconds of each part.

    python -m cfp_test.bench planning [gpt llama moe bert] --json FILE [--tiny]

Models are those of the benchmark `side_by_side`, four layers at full width, on two
devices. The file is written after each model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

import cfp
from cfp import platform
from cfp_test.bench.commit import commit
from cfp_test.bench.one_gpu import target_of
from cfp_test.bench.side_by_side import AXES, MODELS, Piece


def row(name: str, *, tiny: bool) -> dict[str, Any]:
    """Plans one model."""
    piece = Piece.of(name)
    target = target_of(piece.zoo_model, piece.options(tiny))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        plan = cfp.plan(
            target.step,
            *target.args,
            mesh=platform.make_mesh(AXES),
            donate_argnums=target.donate,
            cache_dir=folder,
            quiet=True,
        )
    return {
        "model": name,
        "seconds": time.perf_counter() - started,
        "plan": plan.winner,
        "predicted_ms": plan.predicted_ms,
        "measured_ms": plan.measured_ms,
        "raced": sum(one.time_ms is not None for one in plan.race),
        "search": {n: s for n, s in plan.search.items() if isinstance(s, int | float)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", default=[], help=", ".join(MODELS))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="virtual CPU devices")
    given = parser.parse_args()
    platform.select("cpu" if given.tiny else None, AXES)
    data: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "rows": [],
    }
    for name in given.names or ("gpt", "llama", "moe", "bert"):
        data["rows"].append(row(name, tiny=given.tiny))
        print(json.dumps(data["rows"][-1]), flush=True)
        given.json.write_text(json.dumps(data, indent=1) + "\n")
        jax.clear_caches()


if __name__ == "__main__":
    main()
