"""Kinds of attentions that a rewrite may take for other ones: results stay equal."""

import pytest

from cfp_test.kernels.agreement import TOLERANCE, compare, gradients_of
from cfp_test.kernels.kinds import ALL
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

pytestmark = pytest.mark.usefixtures("compiled_once")

NAMES = [[(group, name) for name in kinds] for group, kinds in ALL.items()]
DAILY = [name for names in NAMES for name in names[::2]]
OTHERS = [name for names in NAMES for name in names[1::2]]


@pytest.mark.parametrize(("group", "name"), [*DAILY, *at_night(OTHERS)])
def test_a_kernel_computes_what_is_written(group, name):
    kind = ALL[group][name]
    mesh = make_mesh((("x", 1),))
    step = gradients_of(kind.attend, kind.gradients)
    found = compare(step, *kind.inputs(), mesh=mesh)
    assert found.worst <= TOLERANCE, found
