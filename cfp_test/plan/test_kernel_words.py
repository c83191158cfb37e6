"""What plans say of kernels."""

import pytest

from cfp.patterns.build import kernel_name, typed_kernels
from cfp.plan.text import kernels_text

WORDS = {
    "": "",
    "cudnn": "cudnn attention",
    "chunked ring": "chunked ring attention",
    "vocabulary/8": "cross-entropy in 8 parts of the vocabulary",
    "xla+vocabulary/8": "xla attention and cross-entropy in 8 parts of the vocabulary",
}


@pytest.mark.parametrize("kernel", WORDS)
def test_kernels_are_named_in_words_and_read_back(kernel):
    kernels = typed_kernels(kernel)
    assert kernels_text(kernels) == WORDS[kernel]
    assert kernel_name(kernels) == kernel
