"""Sites of attentions as they are written and as replaced: the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.attention.matching.check import sites
from cfp.attention.matching.functions import Way
from cfp_test.attention.agreement import row_error
from cfp_test.attention.known import training_step
from cfp_test.attention.replaced import Step
from cfp_test.support.checking import make_mesh


def drawn(shape, random):
    if shape.dtype == bool:
        return jnp.asarray(random.random(shape.shape) < 0.6)
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jnp.asarray(random.integers(0, 60, shape.shape), shape.dtype)
    return jnp.asarray(random.normal(size=shape.shape), shape.dtype)


@pytest.mark.parametrize(
    "model", ["GPT-2", "LLaMA", "Mistral", "BERT", "packed documents", "MLA"]
)
def test_a_site_computes_the_same_as_written_and_as_replaced(model):
    mesh, random = make_mesh((("x", 1),)), np.random.default_rng(3)
    step = Step(*training_step(model, jnp.float32), mesh)
    program = step.frame.program
    found = [
        site
        for match in step.attentions.found.values()
        for site in sites(program, match, Way("xla"), mesh)
    ]
    assert found
    for site in found:
        operands = [drawn(one, random) for one in site.operands]
        written, replaced = site.written(*operands), jax.jit(site.replaced)(*operands)
        assert len(written) == len(replaced)
        for one, other in zip(written, replaced, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert row_error(other, one) < 1e-3
