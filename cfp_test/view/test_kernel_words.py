"""Texts of plans about kernels."""

import pytest

from cfp.view.words import kernels_text
from cfp_test.support.named_kernels import kernels_named, name_of

WORDS = {
    "": "",
    "cudnn": "cudnn attention",
    "chunked ring": "chunked ring attention",
}


@pytest.mark.parametrize("kernel", WORDS)
def test_kernels_are_named_in_words(kernel):
    kernels = kernels_named(kernel)
    assert name_of(kernels) == kernel
    assert kernels_text(kernels) == WORDS[kernel]
    assert bool(kernels) == bool(kernel)
