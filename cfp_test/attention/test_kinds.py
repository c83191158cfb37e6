"""Kinds of attentions that a rewrite may take for other ones: results stay equal."""

import pytest

from cfp_test.attention.agreement import TOLERANCE, compare, gradients_of
from cfp_test.attention.kinds import ALL
from cfp_test.support.checking import make_mesh

pytestmark = pytest.mark.usefixtures("compiled_once")

NAMES = [(group, name) for group, kinds in ALL.items() for name in kinds]


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_a_kernel_computes_what_is_written(group, name):
    kind = ALL[group][name]
    mesh = make_mesh((("x", 1),))
    step = gradients_of(kind.attend, kind.gradients)
    found = compare(step, *kind.inputs(), mesh=mesh)
    assert found.worst <= TOLERANCE, found
