"""Random steps with attention, as `generate.py` draws them, compute what is written."""

import pytest

from cfp_test.attention.generate import (
    IN_GRADIENT,
    Program,
    Term,
    check,
    draw,
    simpler,
    text_of,
)
from cfp_test.attention.planted import FAULTS
from cfp_test.support.covering import at_night


@pytest.mark.parametrize("number", [*range(30), *at_night(range(30, 330))])
def test_a_random_step_computes_what_is_written(number):
    result = check(draw(number))
    assert not result.wrong, text_of(result.program)


def test_scores_are_of_what_gradients_are_of():
    """A kernel that reads other keys for the gradient makes scores of them."""
    other_keys = Program(changed=IN_GRADIENT[0])
    assert not check(other_keys).wrong
    with FAULTS["any operands"]():
        assert check(other_keys).wrong


def test_a_program_is_made_simpler_one_thing_at_a_time():
    program = Program(masks=(Term("causal", choice="flag"),), heads=4, kv_heads=4)
    texts = {text_of(one) for one in simpler(program)}
    assert "Program(heads=4, kv_heads=4)" in texts
    assert "Program(heads=4, kv_heads=4, masks=(Term(kind='causal'),))" in texts
