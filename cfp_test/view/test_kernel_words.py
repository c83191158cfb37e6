"""Texts of plans about kernels."""

import pytest

from cfp.view.words import kernels_text

WORDS = {
    "": "",
    "cudnn": "cudnn attention",
    "chunked ring": "chunked ring attention",
}


@pytest.mark.parametrize("kernel", WORDS)
def test_kernels_are_named_in_words(kernel):
    kernels = (("attention", kernel),) if kernel else ()
    assert kernels_text(kernels) == WORDS[kernel]
