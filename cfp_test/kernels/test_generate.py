"""Random steps with attention, as `generate.py` draws them, compute what is written."""

import dataclasses

import pytest

from cfp_test.kernels.generate import (
    IN_GRADIENT,
    Program,
    Term,
    check,
    draw,
    simpler,
    text_of,
)
from cfp_test.kernels.planted import FAULTS
from cfp_test.support.covering import at_night

# Programs that are wrong numbers with a rule of the proof off.
PADDED = Term("right padding")
FOUND_BY = {
    "any operands": Program(changed=IN_GRADIENT[0]),
    "any float": Program(changed="scores to e4m3"),
    "sampled positions": Program(masks=(Term("registers"),)),
    "one index": Program(
        loop="slices again",
        masks=(PADDED, dataclasses.replace(PADDED, before=True, again=True)),
    ),
    "rows without keys": Program(masks=(Term("left padding"), Term("causal"))),
    "not compared": Program(changed=IN_GRADIENT[0]),
    "any function": Program(changed="scores cubed", trains=False),
}


@pytest.mark.parametrize("number", [*range(30), *at_night(range(30, 330))])
def test_a_random_step_computes_what_is_written(number):
    result = check(draw(number))
    assert not result.wrong, text_of(result.program)


@pytest.mark.parametrize("fault", [*[*FOUND_BY][:2], *at_night([*FOUND_BY][2:])])
def test_a_fault_in_the_proof_is_found(fault):
    program = FOUND_BY[fault]
    assert not check(program).wrong
    with FAULTS[fault]():
        assert check(program).wrong


def test_a_program_is_made_simpler_one_thing_at_a_time():
    program = Program(masks=(Term("causal", choice="flag"),), heads=4, kv_heads=4)
    texts = {text_of(one) for one in simpler(program)}
    assert "Program(heads=4, kv_heads=4)" in texts
    assert "Program(heads=4, kv_heads=4, masks=(Term(kind='causal'),))" in texts
