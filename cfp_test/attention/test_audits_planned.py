"""Compiled programs of plans with kernels of attention: what they send and keep.

A step whose tokens are spread in all that it does but in its attention, where queries
stay spread (a ring) or heads are spread instead, which is Ulysses.
"""

import re
from dataclasses import replace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.layout import Choice, Storage
from cfp.analysis.strategies import AxisChoice
from cfp.attention import chunked
from cfp.attention.matching.matches import attentions
from cfp.context import open_context
from cfp.passes.pipeline import analyze_step, decide
from cfp.profiling.hlo import collectives_in
from cfp.program.step import flatten_step
from cfp.solution import Candidate, Solution
from cfp_test.programs.common import normal
from cfp_test.support.checking import make_mesh
from cfp_test.support.named_kernels import kernels_named

# No two dims are of one size.
LOCAL, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, CHUNK = 96, 16, 8, 4, 24, 32
TOKENS = "tokens"
FLOAT_BYTES = 4


def loss(params, x):
    q, k, v = (jnp.einsum("bsm,mhd->bshd", x, params[name]) for name in ("q", "k", "v"))
    q = q.reshape(1, x.shape[1], KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) * HEAD_DIM**-0.5
    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    mixed = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)
    mixed = mixed.reshape(1, x.shape[1], HEADS, HEAD_DIM)
    return jnp.square(jnp.einsum("bshd,hdm->bsm", mixed, params["out"]) - x).mean()


def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments(ranks):
    shapes = {"q": (HIDDEN, HEADS, HEAD_DIM), "out": (HEADS, HEAD_DIM, HIDDEN)}
    shapes |= dict.fromkeys(("k", "v"), (HIDDEN, KV_HEADS, HEAD_DIM))
    params = {n: 0.3 * normal(i, *shape) for i, (n, shape) in enumerate(shapes.items())}
    return params, normal(9, 1, LOCAL * ranks, HIDDEN)


def planned(ranks, kernel, folder, in_attention=TOKENS):
    """A plan that spreads tokens, and in attention them or a dim of another size."""
    mesh = make_mesh((("x", ranks),))
    args = arguments(ranks)
    analysis = analyze_step(flatten_step(step, args), mesh).analysis
    frame = analysis.frame
    program, tokens = frame.program, LOCAL * ranks
    [match] = attentions(program).found.values()
    [mix] = {program.values[p.makes["out"].value].producer for p in match.found.forward}
    of_attention = {match.found.op, mix}
    strategies = []
    for block in frame.blocks:
        rule = program.ops[block.anchor].rule
        letters = [""] * len(rule.results[0])
        if block.anchor == match.found.op:
            letters = match.found.scores.letters
        wanted = in_attention if block.anchor in of_attention else TOKENS
        size = tokens if wanted == TOKENS else KV_HEADS
        [factor] = [
            factor
            for factor, letter in zip(
                map(rule.major, rule.results[0]), letters, strict=True
            )
            if factor is not None and rule.sizes[factor] == size and letter != "k"
        ]
        strategies.append((AxisChoice(factor),))
    choice = Choice(tuple(strategies), (Storage.USED,) * len(frame.groups))
    kernels = tuple((s.index, kernels_named(kernel)) for s in analysis.segments)
    solution = Solution([Candidate("by hand", replace(choice, kernels=kernels))])
    settings = cfp.PlannerSettings(race=False)
    with open_context(mesh, folder, None, settings) as context:
        plan, _ = decide(context, analysis, solution)
    return plan


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Plans by hand, compiled, and the text of what they compile to."""
    folder = tmp_path_factory.mktemp("store")
    with patch.object(chunked, "CHUNK", CHUNK):
        found = {}
        for name, ranks, kernel, spread in (
            ("ring", 4, "chunked ring", TOKENS),
            ("ring", 8, "chunked ring", TOKENS),
            ("ulysses", 4, "chunked", "heads"),
        ):
            plan = planned(ranks, kernel, folder, spread)
            ways = {one.functions.how for one in plan.constraints.replaced}
            made = plan.compile(step, *arguments(ranks))
            found[name, ranks] = ways, made
        return found


def sent(made):
    """(kind, bytes) -> how often, of what is not a sum of gradients or of the loss."""
    found = collectives_in(made.as_text())
    return {(c.kind, c.bytes): c.count for c in found if c.kind != "all-reduce"}


def squares(made):
    """Shapes with two dims of as many tokens as a rank has, or more."""
    found = []
    for dims in set(re.findall(r"\bf32\[([\d,]+)\]", made.as_text())):
        if sum(int(dim) >= LOCAL for dim in dims.split(",")) > 1:
            found.append(dims)
    return found


@pytest.mark.parametrize(
    "name, ranks, way",
    [
        ("ring", 4, ("chunked", "x=ring")),
        ("ring", 8, ("chunked", "x=ring")),
        ("ulysses", 4, ("chunked", "x=batch")),  # Of one sequence heads are rows.
    ],
)
def test_plans_compute_what_the_step_does_without_its_scores(
    compiled, name, ranks, way
):
    ways, made = compiled[name, ranks]
    assert ways == {way}
    args = arguments(ranks)
    expected = jax.jit(step)(*args)
    worst = cfp.compare(made(*args), expected)[0]
    assert worst.relative_l2 < 1e-5, worst
    assert squares(made) == []


def test_ulysses_in_a_plan_sends_its_all_to_alls_and_nothing_else(compiled):
    """q, k, v and the output there and back, the gradients the other way round."""
    token = LOCAL * HEAD_DIM * FLOAT_BYTES  # Of a head, on a rank.
    assert sent(compiled["ulysses", 4][1]) == {
        ("all-to-all", token * HEADS): 4,
        ("all-to-all", token * KV_HEADS): 4,
    }


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_ring_in_a_plan_sends_keys_and_values_once_a_step(compiled, ranks):
    """In the backward pass, again, and the gradients of them once more to get home."""
    block = 2 * LOCAL * KV_HEADS * HEAD_DIM * FLOAT_BYTES
    found = sent(compiled["ring", ranks][1])
    assert found == {
        ("collective-permute", block // 2): 2 * (ranks - 1),
        ("collective-permute", block): 2 * (ranks - 1) + 1,
    }


def test_a_ring_in_a_plan_keeps_no_copy_per_step(compiled):
    four, eight = (
        compiled["ring", n][1].compiled.memory_analysis().temp_size_in_bytes
        for n in (4, 8)
    )
    assert four == eight > 0
