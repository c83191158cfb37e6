"""Tries every choice: the oracle that other solvers are held to."""

from __future__ import annotations

from itertools import product

from cfp.search.solver import Assignment, Problem


def solve_exhaustively(problem: Problem) -> Assignment | None:
    """The cheapest choice that fits, or None if none does."""
    best: Assignment | None = None
    ranges = [problem.allowed(kind) for kind in problem.kinds]
    for picks in product(*ranges):
        if problem.fits(picks):
            found = problem.solution(picks)
            if best is None or found.cost_ms < best.cost_ms:
                best = found
    return best
