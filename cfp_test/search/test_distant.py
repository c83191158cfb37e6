"""Values that pass further than to the next segment: their costs, exactly searched."""

import functools
import itertools
import random
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cfp import models
from cfp.analysis.layout import lay_out
from cfp.cost.costs import Costs
from cfp.cost.terms import Terms
from cfp.search.choices import whole_choice
from cfp.search.guided import build_problem
from cfp.search.solver import Problem, solve
from cfp_test.models.tiny import TINY
from cfp_test.programs.registry import PROGRAMS
from cfp_test.search.drawn import option
from cfp_test.search.exhaustive import solve_exhaustively
from cfp_test.search.ilp import solve_ilp
from cfp_test.search.made_up import estimated, options_of, rates_of
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

LINE = (("x", 4),)
SQUARE = (("x", 2), ("y", 2))


@functools.cache
def analysed(name, sizes):
    tied = {"gpt": {"tied": True}}
    made = (
        models.build(name, **TINY[name], **tied.get(name, {}))
        if name in TINY
        else PROGRAMS[name]()[:2]
    )
    return estimated(*made, sizes)[0]


class Program:
    """An example with made-up times of the presets' parts."""

    def __init__(self, name, sizes, most=5, seed=1):
        self.analysis = analysed(name, sizes)
        self.rates = rates_of(sizes)
        self.terms = Terms(self.analysis.frame, self.rates)
        self.costs = Costs(self.analysis, self.rates)
        # Times of the size of what is resharded, so that neither decides alone.
        options = [
            [replace(one, time_ms=one.time_ms * 0.05) for one in options[:most]]
            for options in options_of(self.analysis, seed)
        ]
        self.problem = build_problem(self.costs, options, None)

    def far_ms(self, picks):
        """Prices values that pass far, by the whole program's layout, use by use."""
        frame, segments = self.analysis.frame, self.analysis.segments
        program = frame.program
        choice = whole_choice(self.analysis, self.problem, self.problem.solution(picks))
        layout = lay_out(frame, choice)
        place = {op: s.index for s in segments for op in s.ops}
        owner = {
            program.args[position]: s.index
            for s in segments
            for group in s.groups
            for position in frame.groups[group].args
        }
        wants = {}
        for op in program.ops:
            reader = place.get(program.top_level(op.id))
            for index, v in enumerate(op.operands if reader is not None else ()):
                value = program.values[v]
                if value.shape and value.producer not in program.leaf_ops:
                    maker = (
                        owner.get(v, 0)  # the first segment reads all data first
                        if value.producer < 0
                        else place.get(program.top_level(value.producer), reader)
                    )
                    if maker != reader:
                        key = v, maker, reader
                        wants.setdefault(key, self._read(layout, op, index))
        total = 0.0
        for (v, maker, reader), (have, want, size) in wants.items():
            alike = [
                other
                for w, _, other in wants
                if w == v and (other > maker) == (reader > maker)
                if segments[other].kind == segments[reader].kind
            ]
            nearest = min(alike, key=lambda other: abs(other - maker))
            # What is gathered as it is stored serves all who want it so.
            kept = program.values[v].producer < 0 and layout.read_spec(v) == want
            kept = kept and have == layout.spec(v)
            if reader == nearest and abs(reader - maker) > 1 and not kept:
                total += self.terms.transition_ms(size, have, (), want)
        return total

    def _read(self, layout, op, index):
        """Returns an operand's sharding, the one that is wanted, and its size.

        A parameter that is stored sharded is transposed and cast before it is gathered.
        """
        frame = self.analysis.frame
        v, program = op.operands[index], frame.program
        reads = {op for group in frame.groups for op in group.reads}
        if op.id in reads and layout.spec(v) == layout.use_spec(op.id, index):
            [(user, place)] = program.users[op.results[0]][:1]
            v, have = op.results[0], layout.natural_spec(op, 0)
            want = layout.use_spec(user, place)
        else:
            have, want = layout.spec(v), layout.use_spec(op.id, index)
            producer = program.values[v].producer
            if producer >= 0 and layout.unreduced(program.ops[producer]):
                # A segment by itself sums up what only others read.
                maker = program.ops[producer]
                have = layout.natural_spec(maker, maker.results.index(v))
        return have, want, program.values[v].size_bytes

    def cost_ms(self, picks):
        """Times, what neighbours hand over, and what passes far."""
        near = replace(self.problem, far_ms={})
        return near.cost_ms(picks) + self.far_ms(picks)

    def every_choice(self):
        problem = self.problem
        return itertools.product(
            *(range(len(problem.options[k])) for k in problem.kinds)
        )


@pytest.fixture(scope="module")
def tied():
    return Program("tied_stack", LINE)


@pytest.fixture(scope="module")
def cross():
    return Program("cross_stack", LINE)


@pytest.fixture(scope="module")
def net():
    return Program("u_net", LINE)


def test_what_passes_far(tied, cross, net):
    def far(one):
        return {pair for pair in one.analysis.passing if abs(pair[0] - pair[1]) > 1}

    # The weights there, and their gradient back.
    assert far(tied) == {(0, 3), (3, 0)}
    embed = tied.analysis.frame.program.arg_names.index("state/params/embed")
    value = tied.analysis.frame.program.args[embed]
    assert tied.analysis.passing[0, 3] == [value]
    # What the encoder's last layer makes; the second reader is of the first one's kind.
    assert far(cross) == {(2, 0)}
    # Both skips, there and back.
    assert far(net) >= {(2, 10), (10, 2), (5, 8), (8, 5)}


@pytest.mark.parametrize("name", ["gpt", *at_night(["bert"])])
def test_tied_models_of_the_zoo_pass_their_embedding_on(name):
    found = Program(name, LINE, most=2)
    last = len(found.analysis.segments) - 1
    assert {(0, last), (last, 0)} <= found.analysis.passing.keys()


@pytest.mark.parametrize("which", ["tied", "cross"])
def test_the_search_agrees_with_brute_force_over_whole_programs(which, request):
    found = request.getfixturevalue(which)
    costs = {picks: found.cost_ms(picks) for picks in found.every_choice()}
    for picks, cost in costs.items():
        assert found.problem.cost_ms(picks) == pytest.approx(cost), picks
    best = min(costs.values())
    for one in (solve, solve_exhaustively, solve_ilp):
        assert costs[one(found.problem).picks] == pytest.approx(best)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        *((LINE, name) for name in ("tied_stack", "cross_stack", "u_net")),
        (SQUARE, "tied_stack"),
        *at_night((SQUARE, name) for name in ("cross_stack", "u_net")),
    ],
)
def test_far_prices_are_those_of_the_whole_layout(name, sizes):
    found = Program(name, sizes, most=17)
    draw = random.Random(0)
    seen = Counter()
    for _ in range(12):
        picks = [
            draw.randrange(len(found.problem.options[k])) for k in found.problem.kinds
        ]
        far = found.problem.cost_ms(picks) - replace(found.problem, far_ms={}).cost_ms(
            picks
        )
        assert far == pytest.approx(found.far_ms(picks), abs=1e-12), picks
        seen[far > 0] += 1
    assert seen[True]


def test_without_these_prices_a_slower_plan_is_chosen():
    """For some times of eight, of a net with skips and of tied weights."""

    def costs_more(name, seed):
        found = Program(name, SQUARE, most=17, seed=seed)
        blind = solve(replace(found.problem, far_ms={}))
        best = solve(found.problem)
        assert best.cost_ms <= found.problem.cost_ms(blind.picks)
        return found.problem.cost_ms(blind.picks) > best.cost_ms

    for name in ("tied_stack", "u_net"):
        assert any(costs_more(name, seed) for seed in range(8))


def test_nested_skips_are_searched_exactly(net):
    problem = net.problem.among([range(2) for _ in net.problem.options])
    best = solve_exhaustively(problem)
    assert solve(problem).cost_ms == pytest.approx(best.cost_ms)
    tight = replace(problem, budget_bytes=problem.memory_bytes(best.picks))
    assert solve(tight).cost_ms == pytest.approx(best.cost_ms)


def test_some_segments_keep_what_passes_between_them():
    problem = Problem(
        kinds=(0, 1, 1, 0),
        options=((option(1, 1, 1, 1),), (option(2, 1, 1, 1),)),
        edge_ms={},
        far_ms={(0, 3): [[5.0]], (0, 2): [[7.0]]},
    )
    assert problem.cost_ms((0, 0, 0, 0)) == 6 + 12


def test_a_compiler_reshards_a_value_once_for_all_layers_that_read_it_alike():
    """So of layers of one kind only the nearest pays for it."""
    mesh = make_mesh(LINE)

    def sharding(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    def step(memory, x, weights):
        memory = jax.lax.with_sharding_constraint(jnp.sin(memory), sharding("x"))
        for w in weights:
            read = jax.lax.with_sharding_constraint(memory, sharding())
            x = jnp.tanh(x @ w + (x @ read.T) @ read)
        return x

    rows = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    lowered = jax.jit(
        step, in_shardings=(sharding("x"), sharding("x"), sharding())
    ).lower(rows, rows, [rows] * 3)
    options = {"xla_backend_optimization_level": 0}
    text = lowered.compile(compiler_options=options).as_text() or ""
    assert len(re.findall(r"= \S+ all-gather(?:-start)?\(", text)) == 1
