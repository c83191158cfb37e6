"""Attention on one device or many: kernels and strategies.

The public functions are `cfp.attention` and `cfp.attention_options`. A strategy gives
roles to axes of a mesh (batch, heads, Ulysses, gathered keys, ring, zigzag ring). A
kernel computes blocks of queries and keys (XLA, chunks in lax, cuDNN).
"""
