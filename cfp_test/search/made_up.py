"""Programs with rates and times that nothing measured, the same on any machine."""

import random

from cfp.analysis.analyze import analyze
from cfp.analysis.presets import presets
from cfp.cost.costs import segment_candidate
from cfp.profiling.collectives import Rates
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.search.choices import estimate_kinds
from cfp.search.solver import Option
from cfp_test.support.checking import make_mesh


def rates_of(sizes):
    """Rates that follow from the mesh alone."""
    return Rates.default(make_mesh(sizes))


def estimated(fn, args, sizes, outer=frozenset(), **given):
    """A step's analysis on a mesh, and estimates of its kinds of segments."""
    program, _ = trace(flatten_step(fn, args, {}, **given), make_mesh(sizes))
    analysis = analyze(program, sizes, outer=outer)
    return analysis, estimate_kinds(analysis, rates_of(sizes))


def options_of(analysis, seed):
    """The parts of the presets, of times that a seed tells."""
    draw = random.Random(seed)
    found = []
    for index in analysis.representatives:
        parts = {}
        for choice in presets(analysis.frame).values():
            part = segment_candidate(analysis, index, choice)
            option = Option(
                candidate=part,
                time_ms=draw.uniform(0.1, 2.0),
                state_bytes=0,
                residual_bytes=0,
                temp_bytes=0,
            )
            parts.setdefault(part, option)
        found.append(list(parts.values()))
    return found
