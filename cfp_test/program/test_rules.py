import pytest

from cfp.program.rules import Rule, elementwise_rule, parse_rule, passthrough_rule


def test_matrix_product():
    rule = parse_rule("([i, k], [k, j])->([i, j]) {i=4, j=16, k=8} reduction={k}")
    assert rule == Rule(
        sizes=(4, 16, 8),
        operands=(((0,), (2,)), ((2,), (1,))),
        results=(((0,), (1,)),),
        reduction=frozenset({2}),
    )


def test_printed_attribute():
    text = "#sdy.op_sharding_rule<([i])->([i]) {i=4}>"
    assert parse_rule(text) == Rule((4,), (((0,),),), (((0,),),))


def test_dims_of_several_factors():
    rule = parse_rule("([i, jk])->([i, j, k]) {i=2, j=3, k=4}")
    assert rule.operands == (((0,), (1, 2)),)
    assert rule.results == (((0,), (1,), (2,)),)
    assert rule.major(rule.operands[0][1]) == 1


def test_numbered_factors():
    # Behind z come z_1, z_2, and so on.
    rule = parse_rule("([z, z_1z_2])->([z_1, z_2, z]) {z=2, z_1=3, z_2=5}")
    assert rule.operands == (((0,), (1, 2)),)
    assert rule.results == (((1,), (2,), (0,)),)


def test_dims_without_factors_and_tensors_without_dims():
    rule = parse_rule("([i, j], [])->([i, k]) {i=8, j=1, k=3} need_replication={k}")
    assert rule.operands == (((0,), (1,)), ())
    assert rule.fixed == {2}
    assert parse_rule("([], [])->([])") == Rule((), ((), ()), ((),))


def test_no_operands():
    assert parse_rule("()->([i, j]) {i=2, j=3}").operands == ()


def test_every_kind_of_factor():
    rule = parse_rule(
        "([i, j, k], [l])->([i, j, m]) {i=2, j=3, k=4, l=5, m=6} "
        "reduction={k, l} need_replication={m} permutation={j} blocked_propagation={i}"
    )
    assert rule.reduction == {2, 3}
    assert rule.fixed == {1, 4}


def test_custom_rules():
    rule = parse_rule("#sdy.op_sharding_rule<([i])->([i]) {i=4}, custom>")
    assert rule.sizes == (4,)


def test_major_skips_factors_of_size_one():
    rule = parse_rule("([ij])->([i, j]) {i=1, j=4}")
    assert rule.major(rule.operands[0][0]) == 1
    assert rule.major(rule.results[0][0]) is None


def test_what_a_split_factor_splits():
    merge = parse_rule("([i, j], [k])->([ij]) {i=2, j=4, k=8} reduction={k}")
    assert [merge.splits_results(f) for f in range(3)] == [True, False, True]
    split = parse_rule("([ij])->([i, j]) {i=2, j=4}")
    assert split.splits_results(0)
    assert split.splits_results(1)
    unit = parse_rule("([i, j])->([ij]) {i=1, j=4}")
    assert unit.splits_results(1)


@pytest.mark.parametrize("text", ["", "nonsense", "([i])", "#sdy.sharding<@mesh, []>"])
def test_refuses_what_is_no_rule(text):
    with pytest.raises(ValueError, match="not a sharding rule"):
        parse_rule(text)


def test_elementwise():
    assert elementwise_rule((2, 3), 2, 1) == parse_rule(
        "([i, j], [i, j])->([i, j]) {i=2, j=3}"
    )


def test_passthrough_ties_nothing_together():
    shapes = ((2, 3), (2,), ())
    rule = passthrough_rule(shapes, shapes)
    assert rule.sizes == (2, 3, 2)
    assert rule.operands == rule.results == (((0,), (1,)), ((2,),), ())
