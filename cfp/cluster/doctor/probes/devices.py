"""The devices that JAX finds."""

from __future__ import annotations

from typing import Any

from cfp.cluster.doctor.probes.answer import answer


def find() -> dict[str, Any]:
    """Returns their platform, kind and number."""
    import jax

    found = jax.local_devices()
    return {
        "platform": found[0].platform,
        "kind": found[0].device_kind,
        "count": len(found),
    }


if __name__ == "__main__":
    answer(find)
