"""Rules that are found by running functions on parts, and those that are refused."""

import re

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp_test.discovery import kernels

F32 = jnp.float32


def shape(*sizes, dtype=F32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def normal(*sizes, dtype=F32):
    return jax.random.normal(jax.random.key(len(sizes)), sizes).astype(dtype)


def sharded(rule):
    """The rule's text, its factors that may be sharded, and its sums."""
    return rule.text, {*rule.factors}, {*rule.sums}


def refusals(rule):
    return {one.what: one.why for one in rule.evidence.refused}


def attend(q, k, v):
    """Attention in which some queries' heads share one of the keys."""
    k, v = (jnp.repeat(one, q.shape[2] // one.shape[2], 2) for one in (k, v))
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), v)


# ------------------------------------------------------------------------------ found


FOUND = {
    "rows": (lambda x: jnp.sort(x), [shape(6, 4)], ("a b -> a c", {"a"}, set())),
    "elementwise": (
        lambda x, y: jnp.tanh(x) * y,
        [shape(4, 6), shape(4, 6)],
        ("a b, a b -> a b", {"a", "b"}, set()),
    ),
    "broadcast": (
        lambda x, y: x + y,
        [shape(4, 6), shape(6)],
        ("a b, b -> a b", {"a", "b"}, set()),
    ),
    "product": (
        lambda x, y: x @ y,
        [shape(8, 8), shape(8, 8)],  # Sizes say nothing of what belongs together.
        ("a b, b c -> a c", {"a", "b", "c"}, {("b", 0)}),
    ),
    "transposed": (
        lambda x: jnp.cumsum(x, 0).T,
        [shape(4, 6)],
        ("a b -> b c", {"b"}, set()),
    ),
    "sum": (lambda x: x.sum(0), [shape(4, 6)], ("a b -> b", {"a", "b"}, {("a", 0)})),
    "total": (lambda x: jnp.vdot(x, x), [shape(8)], ("a -> ", {"a"}, {("a", 0)})),
    "norm's gradient": (
        kernels.rms_norm_backward,
        [shape(8, 6), shape(6), shape(8, 6)],
        ("a b, c, a d -> a e, f", {"a"}, {("a", 1)}),
    ),
    "rows of a table": (
        lambda table, rows: table[rows],
        [shape(8, 4), jnp.asarray([1, 4, 2, 7, 0, 5])],
        ("a b, c -> c b", {"b", "c"}, set()),
    ),
    "shared heads": (
        attend,
        [shape(4, 6, 4, 2), shape(4, 5, 2, 2), shape(4, 5, 2, 2)],
        ("a b c d, a e c f, a g c h -> a b c h", {"a", "b", "c", "h"}, set()),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_factors_of_functions_are_found(name):
    fn, args, expected = FOUND[name]
    assert sharded(cfp.discover_rules(fn, *args)) == expected


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounding_of_small_types_is_no_difference(dtype):
    rule = cfp.discover_rules(
        lambda x, y: x @ y, shape(8, 16, dtype=dtype), normal(16, 4)
    )
    assert rule.text == "a b, b c -> a c" and {"a", "c"} <= {*rule.factors}


def test_a_kernel_is_split_between_its_blocks_alone():
    rule = cfp.discover_rules(kernels.rms_norm, normal(16, 8), normal(8))
    assert sharded(rule) == ("a b, c -> a d", {"a"}, set())
    assert rule.multiples == (("a", kernels.ROWS_OF_BLOCK),)
    assert dict(rule.evidence.parts) == {"a": (2, 8)}


def test_pytrees_and_scalars():
    def fn(both, rate):
        return {"sum": both["x"] + rate * both["y"]}

    rule = cfp.discover_rules(fn, {"x": normal(4, 3), "y": normal(4, 3)}, 0.1)
    assert rule.text == "a b, a b,  -> a b"


def test_what_was_found_is_written_down_and_made_again():
    rule = cfp.discover_rules(lambda x, y: x @ y, shape(4, 6), shape(6, 2))
    again = eval(repr(rule), {"ShardingRule": cfp.ShardingRule})
    assert again == rule and again.evidence is None
    assert str(rule).splitlines()[0] == "a b, b c -> a c"
    assert "the parts' results 0 are added up" in str(rule)
    assert re.search(r"from \d+ runs of \d+ programs", str(rule))


# ---------------------------------------------------------------------------- refused


REFUSED = {
    "softmax": kernels.softmax_over_rows,
    "running sum": kernels.running_sum,
    "position": kernels.with_position,
    "mean": lambda x: x - x.mean(0),
    "flip": lambda x: x[::-1],
    "neighbour": lambda x: x + jnp.roll(x, 1, 0),
    "size": lambda x: x / x.shape[0],
    "sorted": lambda x: jnp.sort(x, 0),
    # What hides behind the usual numbers.
    "rare": lambda x: x * jnp.where(x.max() > 1e9, 2.0, 1.0),
    "guarded": lambda x: jnp.where(jnp.isfinite(x).all(), x, 0.0),
    "faint": lambda x: x * (1 + 1e-4 * jnp.abs(x).max()),
    "drowned": lambda x: jnp.maximum(x, 1e-6 * jnp.abs(x).max(0)),
    # What adds up only nearly.
    "average": lambda x: x.mean(0),
    "largest": lambda x: x.max(0),
    "constant": lambda x: x.sum(0) + 1e-9,
    "logarithm": lambda x: jax.nn.logsumexp(x, 0),
    "root": lambda x: jnp.sqrt((x * x).sum(0)),
    # What takes no parts.
    "fixed": lambda x: x + jnp.zeros((8, 4)),
    "no number": lambda x: jnp.log(-jnp.abs(x)),
    "unread": lambda x: jnp.zeros(3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_in_parts_is_refused_with_a_reason(name):
    rule = cfp.discover_rules(REFUSED[name], shape(8, 4))
    assert not any((0, 0) in places for places in rule.factors.values())
    assert refusals(rule)["x dim 0"]


def test_reasons_say_what_differed():
    why = refusals(cfp.discover_rules(kernels.with_position, shape(8, 4)))["x dim 0"]
    assert re.match(
        r"part \d of 2 alone gives another part of result 0 .* instead of", why
    )
    why = refusals(cfp.discover_rules(REFUSED["guarded"], shape(8, 4)))["x dim 0"]
    assert "changes with the other parts (NaN there" in why
    why = refusals(cfp.discover_rules(REFUSED["softmax"], shape(8, 4)))["x dim 0"]
    assert "changes along dim 0 in other parts" in why


def test_a_kernel_of_fixed_blocks_says_what_it_refused():
    def fixed(x):
        return x.reshape(8, 4) * 2

    rule = cfp.discover_rules(fixed, shape(8, 4))
    assert not rule.factors and rule.wrap(fixed) is fixed
    assert "nothing may be sharded" in str(rule)
    assert "refused for 2 parts (TypeError" in refusals(rule)["x dim 0"]


def test_a_size_that_no_small_number_divides_stays_whole():
    rule = cfp.discover_rules(jnp.tanh, shape(37, 4))
    assert {*rule.factors} == {"b"} and "not divided" in refusals(rule)["x dim 0"]


@pytest.mark.parametrize(
    "args",
    [
        (shape(4, dtype=jnp.int32),),
        (jnp.zeros(4, jnp.int32),),
        (jax.random.key(0),),
        (),
    ],
    ids=["integers of a shape", "equal integers", "a key", "nothing"],
)
@pytest.mark.explained("A rule cannot be discovered with this argument")
def test_arguments_that_no_numbers_can_be_drawn_for_are_refused(args):
    with pytest.raises(cfp.CfpError, match=r"[Ee]xpected"):
        cfp.discover_rules(lambda *x: x, *args)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("a b", {}),
        ("a 1 -> a", {}),
        ("a b -> a", {"whole": ("c",)}),
        ("a b -> a", {"sums": (("a", 0),)}),
        ("a b -> a", {"sums": (("b", 1),)}),
        ("a b -> a", {"multiples": (("c", 2),)}),
    ],
)
def test_what_is_no_rule_is_refused(text, how):
    with pytest.raises(cfp.CfpError, match="rule"):
        cfp.ShardingRule(text, **how)
