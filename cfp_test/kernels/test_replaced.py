"""Attentions of the zoo and of other libraries: matched, replaced, and checked.

A check is that of `cfp run --check`: loss and new state under a plan, beside those of
the untouched step on one device.
"""

import itertools
import re
from unittest.mock import patch

import pytest

from cfp.kernels import chunked
from cfp_test.kernels.replaced import Step
from cfp_test.models.tiny import draw_start
from cfp_test.programs import attentive
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

pytestmark = pytest.mark.usefixtures("compiled_once", "compared_on_one")

TOKENS, CHUNK = 24, 8
SMALL = {"hidden": 16, "heads": 4, "batch": 4, "seq": TOKENS, "vocab": 40}
MODELS = {
    "gpt": {},
    "moe": {"experts": 4, "expert_group_size": TOKENS, "ffn": 32},
    "bert": {},
    "llama": {"ffn": 32, "kv_heads": 2},
}
# How layers run: in a scan, and rematerialized. A mixture, the largest, as written.
WAYS = [(True, True), (False, False), (False, True), (True, False)]
# Those of libraries, below, are as written.
DAILY = [("gpt", (True, True)), ("llama", (True, False))]
# What libraries write, the kernel that replaces it, and why that is not the one which
# leaves no scores.
LIBRARIES = {
    attentive.linen_attention_step: ("chunked", None),
    attentive.nnx_attention_step: ("chunked", None),
    attentive.equinox_attention_step: ("chunked", None),
    attentive.haiku_attention_step: ("chunked", None),
    attentive.gpt2_style_attention_step: ("chunked", None),
    attentive.wide_scores_attention_step: ("chunked", None),
}


@pytest.fixture(scope="module", autouse=True)
def short_chunks():
    with patch.object(chunked, "CHUNK", CHUNK):
        yield


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((("x", 4),))


@pytest.fixture(scope="module")
def untouched():
    """Steps as they are written, compiled once for those that compute the same."""
    return {}


def squares(compiled):
    """Shapes with two dims of all tokens, in a compiled program."""
    shapes = set(re.findall(r"\w\d+\[([\d,]+)\]", compiled.as_text()))
    return [one for one in shapes if one.split(",").count(str(TOKENS)) > 1]


def zoo(model, scan, remat, mesh):
    # Of a mixture of experts two layers are one of a scan.
    layers = (2 if scan else 1) * (2 if model == "moe" else 1)
    size = {**SMALL, **MODELS[model], "layers": layers, "dtype": "float32"}
    options = {**size, "scan": scan, "remat": remat}
    return Step(*draw_start(model, **options), mesh)


@pytest.mark.parametrize(
    ("model", "way"),
    [
        *DAILY,
        *at_night(one for one in itertools.product(MODELS, WAYS) if one not in DAILY),
    ],
)
def test_attentions_of_the_zoo_are_replaced(mesh, untouched, model, way):
    """A reader of an attention changes neither how it is found nor its replacement."""
    scan, remat = way
    step = zoo(model, scan, remat, mesh)
    assert step.attentions.left_alone == ()
    # Scores that a backward pass computes again are an attention of their own.
    sites = (2 if model == "moe" else 1) * (2 if remat else 1)
    assert len(step.attentions.found) == sites
    if (model, scan) not in untouched:
        untouched[model, scan] = step.alone
    alone = untouched[model, scan]
    planned, replaced = step.with_kernel("chunked")
    # Forward and backward in one, or one each where a loop lies between or the forward
    # pass is rematerialized.
    assert len(replaced) >= len(step.attentions.found)
    assert step.far(planned, alone) == []
    # No scores are left, in no pass; there are some in the step as it is written.
    assert squares(planned) == []
    assert squares(alone) != []


@pytest.mark.parametrize(
    "make",
    [
        attentive.linen_attention_step,
        attentive.equinox_attention_step,
        attentive.haiku_attention_step,
        attentive.wide_scores_attention_step,
        *at_night([attentive.nnx_attention_step, attentive.gpt2_style_attention_step]),
    ],
    ids=lambda make: make.__name__,
)
def test_attentions_of_other_libraries_are_replaced(mesh, make):
    kernel, why_not = LIBRARIES[make]
    step = Step(*make(), mesh)
    assert step.attentions.left_alone == ()
    assert len(step.attentions.found) == 1
    assert step.refusal("chunked") == why_not
    planned, replaced = step.with_kernel(kernel)
    assert {one.functions.how[0] for one in replaced} == {kernel}
    assert step.far(planned) == []
