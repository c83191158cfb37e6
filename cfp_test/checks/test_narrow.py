"""Tolerances of a check where kernels compute in bfloat16."""

from cfp.checking.check import (
    LOW_TOLERANCE,
    NARROW_MARGIN,
    Comparison,
    Difference,
    NormRange,
)

_PATH = "0/params/w"


def _compared(off: float, change: float) -> Comparison:
    """A parameter that its nudge moved by 0.0078, and that a step changes by less."""
    return Comparison(
        differences=(Difference(path=_PATH, relative_l2=off),),
        rounding={_PATH: 0.0078},
        changes={_PATH: change},
        sizes={_PATH: NormRange(found=1.0, least=1.0, most=1.0)},
        margin=NARROW_MARGIN,
    )


def test_an_update_that_is_wrong_many_times_over_fails():
    made = _compared(off=5e-3, change=1e-4)
    assert [d.path for d in made.failures(LOW_TOLERANCE)] == [_PATH]


def test_an_update_whose_signs_turn_passes():
    made = _compared(off=2e-4, change=1e-4)
    assert made.failures(LOW_TOLERANCE) == []
