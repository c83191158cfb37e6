"""One plan in all processes of a program: that of process 0."""

from __future__ import annotations

import json
from dataclasses import replace

from cfp.errors import ProcessError, compose
from cfp.plan.plan import Plan
from cfp.profiling.processes import Agreement

# What the step is compiled from. All processes have come to the same, or there would
# be as many programs.
_DECIDED = (
    "fingerprint",
    "mesh_axes",
    "arg_specs",
    "output_specs",
    "constraints",
    "options",
    "winner",
)


def common_plan(agreement: Agreement, plan: Plan) -> Plan:
    """Process 0's plan, with all of its figures, on this process's devices.

    Raises:
        ProcessError: this process has come to another plan.
    """
    if agreement.alone:
        return plan
    plain = replace(plan, sites=None, step=None, mesh=None)
    text = agreement.decided("the plan", plain.to_json() if agreement.decides else "")
    if agreement.decides:
        return plan
    theirs = Plan.from_json(json.loads(text), allowed_options=tuple(plan.options))
    for name in _DECIDED:
        if getattr(theirs, name) != getattr(plan, name):
            raise ProcessError(
                compose(
                    f"The processes have come to different plans: the {name} differ.",
                    expected=f"process 0's plan, {theirs.winner!r}",
                    got=f"{plan.winner!r}",
                    attempt="plan in one process with --for, or load a saved plan in "
                    "all; and please report this",
                )
            )
    return replace(
        theirs,
        mesh=plan.mesh,
        step=plan.step,
        out_tree=plan.out_tree,
        raced=plan.raced,
        tuned=plan.tuned,
    )
