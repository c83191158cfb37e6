"""An import of JAX."""

from __future__ import annotations

from cfp.cluster.doctor.probes.answer import answer


def find() -> dict[str, str]:
    """Returns JAX's version, and the file that it comes from."""
    import jax

    return {"version": jax.__version__, "file": jax.__file__}


if __name__ == "__main__":
    answer(find)
