"""Kernels that may compute parts of a step: one protocol, and the list of kinds.

kinds      the protocol, and the list
call       `cfp.attention`, `cfp.attention_options`: a kernel, with roles of mesh axes
registry   attention's kernels by name: XLA (`plain`), `chunked`, `cudnn`
ring       attention with keys and values that pass around a ring of devices
problem    shapes, scores and masks of an attention; strategies, roles of mesh axes
region     Program -> Region: the ops between scores and gradients; equality of values
core       Region -> Steps -> Core of each pass: steps on arrays with named dims
proof      Core -> Table -> Proved: the proof; masks, biases, lengths for kernels
matches    Proved passes -> Match; Match + layout -> Way -> Replacement
functions  the functions that compute a replacement, from Meaning and Way
"""
