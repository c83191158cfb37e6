r"""The search as an integer linear program, solved by HiGHS: an oracle for cfp's own.

For segment i with options o and binary x[i,o], and y[i,j,o,p] for segments i and j
between which something passes, neighbours and others::

    minimise    sum_io  time[i,o] x[i,o]  +  sum_ijop  edge[i,j,o,p] y[i,j,o,p]
    subject to  sum_o x[i,o] = 1                                  for each i   (one)
                sum_p y[i,j,o,p] = x[i,o]                     for each i,j,o  (leave)
                sum_o y[i,j,o,p] = x[j,p]                     for each i,j,p  (enter)
                fixed + sum_jo state[j,o] x[j,o] + sum_{j<=i},o residual[j,o] x[j,o]
                    + sum_o temp[i,o] x[i,o] <= budget          for each i   (fit)

(fit) is the memory while segment i runs, there or back: all state, what forward passes
have kept by then, and what it needs besides. With x binary, y may be continuous in
[0, 1]: (leave) and (enter) then force it to the product of its x. Memory is written in
x alone, though variables for the running sums would take fewer coefficients: with them
HiGHS 1.12 to 1.15 presolves some problems to a worse choice, or to none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pulp

from alpa_test.cost_model.quiet import quiet_solver
from cfp.search.solver import Assignment, Problem

_MIB = 2.0**20  # keeps the coefficients of memory near those of time


def solve_ilp(problem: Problem) -> Assignment | None:
    """The cheapest choice that fits, or None if none does."""
    model = pulp.LpProblem("segments", pulp.LpMinimize)
    cost: list = []
    x = [_one(model, problem, i, cost) for i in range(len(problem.kinds))]
    for i, pair in enumerate(pairwise(problem.kinds)):
        if pair in problem.edge_ms:
            _edges(model, problem.edge_ms[pair], (i, i + 1), x, cost)
    for places, matrix in problem.far_ms.items():
        _edges(model, matrix, places, x, cost)
    if problem.budget_bytes is not None:
        room = (problem.budget_bytes - problem.fixed_bytes) / _MIB
        for i, peak in enumerate(_peaks(problem, x)):
            model.addConstraint(peak <= room, f"fit_{i}")
    model.setObjective(pulp.lpSum(cost))
    with quiet_solver():
        model.solve(pulp.HiGHS(msg=False, gapRel=0.0))
    status = pulp.LpStatus[model.status]
    assert status in ("Optimal", "Infeasible"), status
    if status == "Infeasible":
        return None
    picks = [max(range(len(row)), key=lambda o, row=row: row[o].value()) for row in x]
    return problem.solution(picks)


def leanest(problem: Problem, *, time_limit_s: float = 60.0) -> Assignment:
    """The choice that needs the least memory, whatever the budget.

    Raises:
        AssertionError: the solver found nothing, which only lack of time explains.
    """
    model = pulp.LpProblem("memory", pulp.LpMinimize)
    x = [_one(model, problem, i, []) for i in range(len(problem.kinds))]
    most = model.add_variable("most", lowBound=0)
    for i, peak in enumerate(_peaks(problem, x)):
        model.addConstraint(peak <= most, f"fit_{i}")
    model.setObjective(most)
    with quiet_solver():
        model.solve(pulp.HiGHS(msg=False, timeLimit=time_limit_s, gapRel=0.0))
    assert pulp.LpStatus[model.status] in ("Optimal", "Not Solved"), "a choice exists"
    picks = [max(range(len(row)), key=lambda o, row=row: row[o].value()) for row in x]
    return problem.solution(picks)


def _one(model: pulp.LpProblem, problem: Problem, i: int, cost: list) -> list:
    assert problem.kept is None, "all options may be picked"
    options = problem.options[problem.kinds[i]]
    row = [
        model.add_variable(f"x_{i}_{o}", cat=pulp.LpBinary) for o in range(len(options))
    ]
    model.addConstraint(pulp.lpSum(row) == 1, f"one_{i}")
    cost.extend(o.time_ms * v for o, v in zip(options, row, strict=True))
    return row


def _edges(
    model: pulp.LpProblem,
    matrix: Sequence[Sequence[float]],
    places: tuple[int, int],
    x: list[list],
    cost: list,
) -> None:
    """Prices the values that pass between two places."""
    i, j = places
    y = [
        [
            model.add_variable(f"y_{i}_{j}_{o}_{p}", lowBound=0, upBound=1)
            for p in range(len(x[j]))
        ]
        for o in range(len(x[i]))
    ]
    for o, row in enumerate(y):
        model.addConstraint(pulp.lpSum(row) == x[i][o], f"leave_{i}_{j}_{o}")
        cost.extend(matrix[o][p] * v for p, v in enumerate(row))
    for p in range(len(x[j])):
        entering = pulp.lpSum(row[p] for row in y)
        model.addConstraint(entering == x[j][p], f"enter_{i}_{j}_{p}")


def _peaks(problem: Problem, x: list[list]) -> list[pulp.LpAffineExpression]:
    """Lists the memory while each segment runs, in MiB, without the fixed part."""
    options = [problem.options[kind] for kind in problem.kinds]
    state = [
        option.state_bytes / _MIB * pick
        for choices, row in zip(options, x, strict=True)
        for option, pick in zip(choices, row, strict=True)
    ]
    kept: list = []
    peaks = []
    for choices, row in zip(options, x, strict=True):
        kept += [o.residual_bytes / _MIB * v for o, v in zip(choices, row, strict=True)]
        temps = [o.temp_bytes / _MIB * v for o, v in zip(choices, row, strict=True)]
        peaks.append(pulp.lpSum(state + kept + temps))
    return peaks
