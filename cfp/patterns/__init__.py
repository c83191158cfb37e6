"""Parts of programs that are known by their structure and can be computed otherwise.

A cross-entropy of logits need not hold the logits: `cross_entropy` finds what reads
them, and `chunked` computes the same over parts of the vocabulary. What was found is
proved on small random inputs (`sites`) before anything takes its place.
"""
