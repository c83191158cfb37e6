r"""Solves the formulation with HiGHS.

For block v with options o (a strategy s(o) and a storage), binary x[v,o]; for a pair of
blocks with a matrix of costs, y[s,t] of their strategies::

    minimise    sum_vo  ms[v,o] x[v,o]  +  sum_(u,v),s,t  R_uv[s,t] y_uv[s,t]
    subject to  sum_o x[v,o] = 1                                       (one)
                sum_t y_uv[s,t] = sum_(o with s) x[u,o]                (leave)
                sum_s y_uv[s,t] = sum_(o with t) x[v,o]                (enter)
                sum_vo  bytes[v,o] x[v,o] <= budget                    (fit)

y may be continuous: with x binary it is the product of the two.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from alpa_test.cost_model.formulation import MODES, Formulation, formulate
from alpa_test.cost_model.quiet import quiet_solver
from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.errors import CfpError

_MIB = 2.0**20
_Option = tuple[int, int]  # the numbers of a strategy and of a storage


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """Choice of the cost model.

    Attributes:
        choice: for cfp to compile.
        cost_ms: the objective there: communication alone, unless compute was priced.
        memory_bytes: what the constraint counted.
        optimal: whether that was proved before the time was up.
        seconds: formulating and solving.
        formulation: to ask what it believes of other choices.
    """

    choice: Choice
    cost_ms: float
    memory_bytes: int
    optimal: bool
    seconds: float
    formulation: Formulation


def choose(
    analysis: Analysis,
    prices: Any,
    *,
    budget_bytes: int | None = None,
    time_limit_s: float = 300.0,
) -> Modelled:
    """The cheapest choice by the model.

    Args:
        analysis: the program on its mesh.
        prices: an `AlphaBeta`, or anything with the methods of `Rates`.
        budget_bytes: memory of one device, or None for no limit.
        time_limit_s: for the solver.

    Raises:
        CfpError: no choice fits, or none was found in time.
    """
    started = time.perf_counter()
    problem = formulate(analysis, prices)
    picks, optimal = solve(problem, budget_bytes, time_limit_s)
    return Modelled(
        choice=problem.choice(picks),
        cost_ms=problem.cost_ms(picks),
        memory_bytes=problem.memory_bytes(picks),
        optimal=optimal,
        seconds=time.perf_counter() - started,
        formulation=problem,
    )


def solve(
    problem: Formulation, budget_bytes: int | None, time_limit_s: float
) -> tuple[list[_Option], bool]:
    """(strategy, storage) numbers for each block, and whether they are proved best.

    Raises:
        CfpError: no choice fits, or none was found in time.
    """
    model = pulp.LpProblem("alpa", pulp.LpMinimize)
    options = [
        _useful(costs, sizes, budget_bytes is not None)
        for costs, sizes in zip(problem.node_ms, problem.node_bytes, strict=True)
    ]
    x = [_node(model, v, found) for v, found in enumerate(options)]
    terms = [
        float(problem.node_ms[v][option]) * one
        for v, row in enumerate(x)
        for option, one in row.items()
    ]
    for number, ((u, v), matrix) in enumerate(sorted(problem.edge_ms.items())):
        terms += _pair(model, number, x[u], x[v], matrix)
    if budget_bytes is not None:
        used = [
            float(problem.node_bytes[v][option]) / _MIB * one
            for v, row in enumerate(x)
            for option, one in row.items()
        ]
        model.addConstraint(pulp.lpSum(used) <= budget_bytes / _MIB, "fit")
    model.setObjective(pulp.lpSum(terms))
    with quiet_solver():
        model.solve(pulp.HiGHS(msg=False, timeLimit=time_limit_s, gapRel=0.0))
    solved = model.sol_status in (
        pulp.LpSolutionOptimal,
        pulp.LpSolutionIntegerFeasible,
    )
    if not solved:
        raise CfpError(
            "The cost model found no choice: none fits into the memory budget, or the "
            f"{time_limit_s:.0f} seconds of its solver were too few. Raise either."
        )
    picks = [max(row, key=lambda option, row=row: row[option].value()) for row in x]
    return picks, model.sol_status == pulp.LpSolutionOptimal


def _useful(costs: np.ndarray, sizes: np.ndarray, tight: bool) -> list[_Option]:
    """Lists for each strategy the storages that may be part of a best choice."""
    found = []
    for s in range(len(costs)):
        by_cost = [(costs[s][m], sizes[s][m], m) for m in range(len(MODES))]
        smallest = np.inf
        for *_, m in sorted(by_cost):
            if sizes[s][m] < smallest:
                found.append((s, m))
                smallest = sizes[s][m]
            if not tight:
                break
    return found


def _node(
    model: pulp.LpProblem, v: int, options: list[_Option]
) -> dict[_Option, pulp.LpVariable]:
    row = {
        (s, m): model.add_variable(f"x_{v}_{s}_{m}", cat=pulp.LpBinary)
        for s, m in options
    }
    model.addConstraint(pulp.lpSum(row.values()) == 1, f"one_{v}")
    return row


def _pair(
    model: pulp.LpProblem,
    number: int,
    left: dict[_Option, pulp.LpVariable],
    right: dict[_Option, pulp.LpVariable],
    matrix: np.ndarray,
) -> list:
    if not matrix.any():
        return []
    rows, columns = matrix.shape
    y = [
        [
            model.add_variable(f"y_{number}_{s}_{t}", lowBound=0, upBound=1)
            for t in range(columns)
        ]
        for s in range(rows)
    ]
    for s in range(rows):
        leaving = pulp.lpSum(one for (o, _), one in left.items() if o == s)
        model.addConstraint(pulp.lpSum(y[s]) == leaving, f"leave_{number}_{s}")
    for t in range(columns):
        entering = pulp.lpSum(one for (o, _), one in right.items() if o == t)
        into = pulp.lpSum(y[s][t] for s in range(rows))
        model.addConstraint(into == entering, f"enter_{number}_{t}")
    return [
        float(matrix[s, t]) * y[s][t]
        for s in range(rows)
        for t in range(columns)
        if matrix[s, t]
    ]
