"""Lower bounds on what unmeasured candidates take, from what measured ones took.

An estimate adds up what contractions, other ops and moves would take one after
another, at the devices' measured rates. The compiler fuses ops and hides moves behind
contractions, so each part counts with a weight between 0 and 1. The weights are the
largest with which no measured candidate of a kind of segment is faster than the
weighed estimate says: a small linear program for each kind, solved again whenever
more is measured.

What is measured is bounded by construction. For what is not, the weights are lowered
by a margin, since parts may overlap better there than anywhere that was looked at.
"""

from __future__ import annotations

import numpy as np

# By leaving out one candidate after another; see docs/decisions.md.
MARGIN = 0.9
_LEAST_MS = 1e-6


def fit_weights(parts_ms: np.ndarray, times_ms: np.ndarray) -> np.ndarray:
    """The largest weights under which every weighed estimate is a lower bound.

    Args:
        parts_ms: ``[candidate][part]``, what the estimates are the sums of.
        times_ms: what the candidates took.

    Returns:
        A weight in [0, 1] for each part. Largest means that the bounds are as near to
        the times as they can be, in relative terms and on average.
    """
    # Most commands need no bounds, and this takes a sixth of their start.
    from scipy.optimize import linprog

    # A clock may be too coarse for what is very short.
    shares = parts_ms / np.maximum(times_ms, _LEAST_MS)[:, None]
    found = linprog(
        -shares.sum(axis=0), A_ub=shares, b_ub=np.ones(len(shares)), bounds=(0.0, 1.0)
    )
    assert found.status == 0, "weights of zero are always feasible"
    return found.x
