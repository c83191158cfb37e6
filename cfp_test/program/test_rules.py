import pytest
from jax.extend.mlir import ir

from cfp.program import shardy
from cfp.program.rules import Rule, elementwise_rule, passthrough_rule, rule_of


@pytest.fixture(scope="module")
def rule():
    """Reads a rule from its text."""
    context = shardy.parsed(b"module {}").context

    def read(text: str) -> Rule:
        attribute = f"#sdy.op_sharding_rule<{text}>"
        return rule_of(ir.Attribute.parse(attribute, context))

    return read


def test_every_kind_of_factor(rule):
    found = rule(
        "([i, jk], [l], [])->([i, j, k, m]) {i=2, j=3, k=4, l=5, m=6} "
        "reduction={l} need_replication={m} permutation={j} blocked_propagation={i}"
    )
    assert found == Rule(
        sizes=(2, 3, 4, 5, 6),
        operands=(((0,), (1, 2)), ((3,),), ()),
        results=(((0,), (1,), (2,), (4,)),),
        reduction=frozenset({3}),
        fixed=frozenset({1, 4}),
    )
    assert found.major(found.operands[0][1]) == 1


def test_major_skips_factors_of_size_one(rule):
    found = rule("([ij])->([i, j]) {i=1, j=4}")
    assert found.major(found.operands[0][0]) == 1
    assert found.major(found.results[0][0]) is None


def test_what_a_split_factor_splits(rule):
    merge = rule("([i, j], [k])->([ij]) {i=2, j=4, k=8} reduction={k}")
    assert [merge.splits_results(f) for f in range(3)] == [True, False, True]
    split = rule("([ij])->([i, j]) {i=2, j=4}")
    assert split.splits_results(0)
    assert split.splits_results(1)
    unit = rule("([i, j])->([ij]) {i=1, j=4}")
    assert unit.splits_results(1)


def test_elementwise(rule):
    assert elementwise_rule((2, 3), 2, 1) == rule(
        "([i, j], [i, j])->([i, j]) {i=2, j=3}"
    )


def test_passthrough_ties_nothing_together():
    shapes = ((2, 3), (2,), ())
    rule = passthrough_rule(shapes)
    assert rule.sizes == (2, 3, 2)
    assert rule.operands == rule.results == (((0,), (1,)), ((2,),), ())
