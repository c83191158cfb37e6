"""The models of the zoo with their cross-entropies over parts of the vocabulary."""

import dataclasses
import functools

import jax
import pytest

from cfp.analysis.analyze import analyze
from cfp.analysis.layout import lay_out
from cfp.errors import PlanMismatch
from cfp.patterns.sites import cross_entropies
from cfp.presets.presets import presets
from cfp.program.constrain import constrain
from cfp.program.replace import Recorded, erase_unread
from cfp.program.trace import lower_step
from cfp.runtime.execute import resolved
from cfp.search.jobs import constraints_of
from cfp.settings import ConstraintLevel
from cfp_test.models.tiny import TINY, draw_start
from cfp_test.support.checking import differences, prepare, shardings
from cfp_test.support.covering import at_night
from cfp_test.support.named_kernels import kernels_named

pytestmark = pytest.mark.usefixtures("compiled_once")

MESH = (("x", 2), ("y", 2))


@functools.cache
def case_of(name, **options):
    # A scan of two, and a layer of experts besides one without.
    layers = 2 if name == "moe" or options.get("scan") else 1
    options = {**TINY[name], "layers": layers, **options}

    def make():
        # Adam's first step is a sign: rounding of what is near zero would show.
        return *draw_start(name, **options), {"tolerance": 1e-3}

    return prepare(name, make, MESH)


def planned(case, kernel):
    """Constraints of a data parallel plan with a kernel in all of its segments."""
    analysis = analyze(case.frame.program, tuple(case.mesh.shape.items()))
    choice = presets(analysis.frame)["data_parallel"]
    kernels = tuple((s.index, kernels_named(kernel)) for s in analysis.segments)
    choice = dataclasses.replace(choice, kernels=kernels)
    everything = ConstraintLevel.EVERYTHING
    inside = constraints_of(analysis, choice, everything)
    return inside, lay_out(analysis.frame, choice)


@pytest.mark.parametrize(
    ("name", "options", "kernel", "attentions"),
    [
        ("bert", {"remat": True}, "vocabulary/4", 0),
        ("gpt", {}, "chunked+vocabulary/4", 1),
        *at_night(
            [
                ("llama", {"scan": True}, "vocabulary/4", 0),
                ("gpt", {"microbatches": 2}, "vocabulary/4", 0),
                ("moe", {}, "vocabulary/4", 0),
            ]
        ),
    ],
)
def test_loss_and_state_are_the_untouched_steps(name, options, kernel, attentions):
    case = case_of(name, **options)
    program = case.frame.program
    inside, layout = planned(case, kernel)
    names = [one.name for one in inside.replaced]
    assert names.count("cross-entropy") == 1
    assert len({o.op for o in inside.replaced if o.name == "attention"}) == attentions
    # As a plan's file has it, and found again.
    recorded = tuple(
        dataclasses.replace(one, stages=(), functions=Recorded(one.functions.how))
        for one in inside.replaced
    )
    again = dataclasses.replace(inside, replaced=recorded)
    assert resolved(program, case.mesh, again).replaced == inside.replaced
    ins, outs = shardings(case, layout)
    lowering = lower_step(case.step, ins, outs)
    constrain(lowering.module, program, case.mesh, inside)
    erase_unread(lowering.module)
    compiled = lowering.lowered.compile()
    arrays = [jax.device_put(x, s) for x, s in zip(case.leaves, ins, strict=True)]
    assert differences(case, jax.tree.leaves(compiled(*arrays))) == {}


def test_routers_are_left_alone_with_a_reason():
    found = cross_entropies(case_of("moe").frame.program)
    assert len(found.found) == 1 and found.left_alone
    assert all(one.reason and not one.is_loss for one in found.left_alone)


def test_a_plan_for_another_program_says_so():
    case = case_of("gpt")
    inside, _ = planned(case, "vocabulary/4")
    [one] = inside.replaced
    other = dataclasses.replace(one, op=one.op + 1)
    with pytest.raises(PlanMismatch, match="none that may be replaced"):
        resolved(
            case.frame.program,
            case.mesh,
            dataclasses.replace(inside, replaced=(other,)),
        )
