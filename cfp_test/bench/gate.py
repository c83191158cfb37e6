"""Correctness first: every competitor must train as one device does.

Ten steps of the same model at a small size, in float32 with matrix products at full
precision; the losses must agree to one part in ten thousand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cfp.models import build, initialise
from cfp.models.options import Scalar
from cfp.program.constrain import partition_spec
from cfp_test.bench.case import Ready

STEPS = 10
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Reference:
    """The computation of one device.

    Attributes:
      leaves: the first state and the batch, on the host.
      loss_at: the position of the loss among the results.
      losses: one for each step.
    """

    leaves: tuple[np.ndarray, ...]
    loss_at: int
    losses: tuple[float, ...]


def on_one_device(
    model: str, options: Mapping[str, Scalar], compiler_options: Mapping[str, str]
) -> Reference:
    """Trains on the first device."""
    step, _ = build(model, **options)
    init_fn, make_batch = initialise(model, **options)
    state = init_fn(jax.random.key(0))
    batch = make_batch(jax.random.key(1))
    leaves = tuple(np.asarray(leaf) for leaf in jax.tree.leaves((state, batch)))
    one = jax.jit(step, compiler_options=dict(compiler_options))
    losses = []
    for _ in range(STEPS):
        state, metrics = one(state, batch)
        losses.append(float(metrics["loss"]))
    numbers = jax.tree.unflatten(
        jax.tree.structure((state, metrics)),
        range(len(jax.tree.leaves((state, metrics)))),
    )
    return Reference(leaves, numbers[1]["loss"], tuple(losses))


def losses_of(competitor: Ready, mesh: Mesh, reference: Reference) -> list[float]:
    """Trains as the reference did, under a competitor's shardings."""
    inputs: list[Any] = [
        jax.device_put(leaf.copy(), NamedSharding(mesh, partition_spec(kind.spec)))
        for leaf, kind in zip(reference.leaves, competitor.kinds, strict=True)
    ]
    losses = []
    for _ in range(STEPS):
        results = competitor.built.compiled(*inputs)
        for put, got in competitor.feedback:
            inputs[put] = results[got]
        losses.append(float(results[reference.loss_at]))
    return losses


def largest_gap(losses: list[float], reference: Reference) -> float:
    """The largest relative difference of any step; infinite for what is no number."""
    found, wanted = np.array(losses), np.array(reference.losses)
    gaps = np.abs(found - wanted) / np.abs(wanted)
    return float(np.max(np.where(np.isfinite(gaps), gaps, np.inf)))
