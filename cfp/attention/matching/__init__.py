"""Finds attention in a program, proves it, and replaces it by kernels.

region     Program -> Region: the ops between scores and gradients; equality of values
core       Region -> Steps -> Core of each pass: steps on arrays with named dims
proof      Core -> Table: the softmax's argument for each state of masks; the proof
meaning    Core + Table -> Proved: mask, bias and lengths as kernels take them
matches    Proved passes -> Match; Match + layout -> Way -> Replacement
functions  the functions that compute a replacement, from Meaning and Way
"""
