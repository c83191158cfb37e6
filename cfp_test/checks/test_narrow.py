"""Tolerances of a check where kernels compute in bfloat16."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from cfp.checking.check import Check, Reference, compile_alone
from cfp.program.step import flatten_step

_SHARE = 0.1  # Of the numbers that a kernel reads, of what is asked for.


def rounded(x, wrong=0.0):
    """Operand of a kernel as it hands it on: in bfloat16, and float32 again."""
    shape = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    narrow = (x * (1 + wrong)).astype(jnp.bfloat16)
    return jax.pure_callback(lambda v: v, shape, narrow).astype(jnp.float32)


def common(w, x, y, kernel):
    """A step of whose numbers most is the same twice, and taken away.

    As of attention's gradients, where keys have much in common: no change of the
    arguments shows what rounding does, since both parts change alike.
    """
    h = x @ w
    return {"w": kernel(h + _SHARE * y) - rounded_alike(kernel)(h)}


def rounded_alike(kernel):
    """The same kernel, without a fault."""
    return kernel.func if isinstance(kernel, partial) else kernel


def compared(planned, alone):
    """A step with a kernel beside one without."""
    keys = jax.random.split(jax.random.key(0), 3)
    args = [jax.random.normal(key, (64, 64)) for key in keys]
    args[0] /= 8.0
    planned, alone = (
        compile_alone(flatten_step(one, args), jax.devices()[0])
        for one in (planned, alone)
    )
    assert planned.narrow and not alone.narrow
    check = Check(planned, Reference(alone), {})
    check.start(args)
    return check.step()


def failures(kernel):
    """Distance and rounding of a step with a kernel, and the leaves that fail."""
    found = compared(
        partial(common, kernel=kernel), partial(common, kernel=lambda x: x)
    )
    [only] = found
    return only.relative_l2, only.rounding, found.failures


def test_what_a_kernel_rounds_passes():
    off, rounding, failed = failures(rounded)
    assert off > 1.5e-2  # More than twice what the arguments' last bits do.
    assert 0.1 < off / rounding < 1
    assert failed == []


@pytest.mark.parametrize("wrong", [0.03, 0.1])
def test_what_a_kernel_does_wrong_fails(wrong):
    """By three tenths of what is asked for, and by all of it."""
    off, rounding, failed = failures(partial(rounded, wrong=wrong))
    assert off > 2 * rounding
    assert [one.path for one in failed] == ["w"]


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_a_result_of_nothing_but_a_kernels_rounding_fails(size):
    """The reference's is none, which is no rounding at all."""
    found = compared(
        lambda w, x, y: {"w": size * (rounded(w) - w)}, lambda w, x, y: {"w": w}
    )
    [only] = found
    assert only.size < 1e-2 * max(only.norms)
    assert only.rounding < 1e-2
    assert found.failures == [only] and not only.is_undecided


def test_a_result_of_nothing_but_rounding_on_both_sides_is_undecided():
    """As of the gradient of what a softmax takes away: a kernel's is larger."""

    def nothing(w, x, y, kernel):
        return {"w": kernel(w @ x) - kernel(w @ (x * 3)) / 3}

    found = compared(
        partial(nothing, kernel=rounded), partial(nothing, kernel=lambda x: x)
    )
    [only] = found
    assert only.relative_l2 > 1e3
    assert only.is_undecided and not found.failures
