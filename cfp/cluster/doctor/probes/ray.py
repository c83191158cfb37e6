"""Whether Ray starts on this machine alone, and runs a task."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cfp.cluster.doctor.probes.answer import answer


def find() -> dict[str, Any]:
    """Ray's version, and what a task returned."""
    ray = import_module("ray")
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        found = ray.get(ray.remote(lambda: 6 * 7).remote(), timeout=60)
    finally:
        ray.shutdown()
    return {"version": ray.__version__, "found": found}


if __name__ == "__main__":
    answer(find)
