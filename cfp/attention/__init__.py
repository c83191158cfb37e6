"""Attention: what computes it on one device, and how it is spread over many.

`cfp.attention` and `cfp.attention_options` are what people call. A strategy gives roles
to axes of a mesh (batch, heads, Ulysses, gathered keys, ring, zigzag ring); a kernel
computes the blocks (XLA, chunks in lax, cuDNN).
"""
