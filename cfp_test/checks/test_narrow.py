"""Tolerances of a check where kernels compute in bfloat16."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from cfp.checking.check import Check
from cfp.checking.reference import Reference, compile_alone
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


def failures(kernel):
    """The leaves that fail of a step with a kernel, beside one without."""
    keys = jax.random.split(jax.random.key(0), 3)
    args = [jax.random.normal(key, (64, 64)) for key in keys]
    args[0] /= 8.0
    planned, alone = (
        compile_alone(flatten_step(partial(common, kernel=one), args), jax.devices()[0])
        for one in (kernel, lambda x: x)
    )
    assert planned.narrow and not alone.narrow
    check = Check(planned, Reference(alone), {})
    check.start(args)
    found = check.step()
    [only] = found.differences
    return only.relative_l2, found.rounding["w"], found.failures(check.tolerance)


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
