"""Generated steps: random graphs of ops, under random choices."""

import multiprocessing
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import HealthCheck, Phase, given, note, reject, seed, settings
from hypothesis import strategies as st

from cfp_test.generated.strategy import all_kinds, steps
from cfp_test.support.checking import (
    compile_choice,
    differences,
    draw,
    make_mesh,
    prepare,
)

PARTS, PART = 5, 52
MESHES = {"x4": (("x", 4),), "x2y2": (("x", 2), ("y", 2))}


def refused(text):
    """Returns True if XLA's CPU backend will refuse to run a compiled program.

    It does so to a Fourier transform of an operand that does not lie in memory in the
    order of its dims, as what was gathered along a later dim may. Seen before it runs:
    a program that one device gives up while others go on has harmed later ones.
    """
    for operand in re.findall(r" fft\((%?[\w.-]+)\)", text):
        layout = re.search(rf"{re.escape(operand)} = \w+\[[\d,]*\]{{([\d,]*)", text)
        assert layout is not None, operand
        order = layout[1].split(",")
        if order != sorted(order, reverse=True):
            return True
    return False


def check(sizes, examples, most, part=0):
    """Draws steps and choices, and compares each with one device.

    Args:
        sizes: the mesh.
        examples: how many.
        most: how many ops are drawn for a step.
        part: other examples for each.

    Returns:
        How many steps have each op: as they were drawn, and as they were lowered.
    """
    drawn, lowered = Counter(), Counter()

    # The same examples in every run, others on each mesh: what fails once in a
    # thousand runs is of no use. To shrink one would take an hour.
    @seed(10 * part + len(sizes))
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(steps(make_mesh(sizes), most), st.integers(0, 1000))
    def example(step, number):
        note(f"ops {step.kinds}, choice {number}")
        case = prepare("generated", step, sizes)
        run = compile_choice(case, draw(case.frame, number))
        if refused(run.compiled.as_text()):
            reject()
        assert differences(case, run()) == {}
        drawn.update({"steps", *step.kinds})
        lowered.update({op.kind for op in case.frame.program.ops})

    example()
    return drawn, lowered


def test_some_steps():
    """Few, but of many kinds; on both meshes."""
    found = [check(sizes, 7, most=4) for sizes in MESHES.values()]
    drawn = sum((d for d, _ in found), Counter())
    lowered = sum((n for _, n in found), Counter())
    assert drawn["steps"] >= 14
    assert len(drawn) > 25, drawn
    assert len(lowered) > 25, lowered


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES)
def test_many_steps(mesh):
    """In a few processes: in one, jaxlib 0.10.2 dies after some 200 other programs."""
    drawn, lowered = Counter(), Counter()
    for part in range(PARTS):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(check, MESHES[mesh], PART, 5, part).result()
        drawn += found[0]
        lowered += found[1]
    assert drawn["steps"] >= PARTS * PART
    # With so few examples chance leaves out some kind, others on each mesh.
    assert len(set(all_kinds()) - set(drawn)) <= 5, drawn
    assert len(lowered) > 50, lowered
