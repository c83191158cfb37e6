"""Shardy's passes, with which cfp reads programs."""

from __future__ import annotations

from typing import Any

from cfp.cluster.doctor.probes.answer import answer


def find() -> dict[str, Any]:
    """Returns the pipelines that are missing, the number of rules, and known faults."""
    import jax
    import jax.numpy as jnp

    from cfp.program import shardy
    from cfp.program.corrections import faults

    missing = shardy.missing_pipelines()
    rules = 0
    if not missing:
        shape = jax.ShapeDtypeStruct((8, 16), jnp.float32)
        lowered = jax.jit(lambda x: jnp.tanh(x @ x.T)).lower(shape)
        module = lowered.compiler_ir("stablehlo")
        assert module is not None, "JAX lowers to StableHLO"
        shardy.normalise(module)
        shardy.add_rules(module)
        main = shardy.main_function(module)
        rules = sum(shardy.RULE in op.attributes for op in shardy.walk(main))
    return {
        "needed": len(shardy.PIPELINES),
        "missing": sorted(missing),
        "reasons": sorted(missing.values()),
        "rules": rules,
        "faults": [fault.name for fault in faults()],
    }


if __name__ == "__main__":
    answer(find)
