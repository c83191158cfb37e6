"""What plans say of kernels, in words that are read back."""

import pytest

from cfp.plan.describe import kernel_text, read_kernel

WORDS = {
    "cudnn": "cudnn attention",
    "chunked ring": "chunked ring attention",
    "vocabulary/8": "cross-entropy in 8 parts of the vocabulary",
    "xla+vocabulary/8": "xla attention and cross-entropy in 8 parts of the vocabulary",
}


@pytest.mark.parametrize("kernel", WORDS)
def test_kernels_are_named_in_words_and_read_back(kernel):
    assert kernel_text(kernel) == WORDS[kernel]
    assert read_kernel(WORDS[kernel]) == kernel


@pytest.mark.parametrize("text", ["", "-", "replicated", "rematerialized"])
def test_other_words_are_no_kernel(text):
    assert read_kernel(text) == ""
