"""Finds attention in a program, proves it, and puts kernels in its place.

values which values are equal, by all that they depend on region Program -> Region: ops
between contractions, dims named; its passes core Region + Pass -> Core: the steps of a
pass, on arrays of named dims proof Core -> Table: the softmax's argument by states of
masks; then the proof meaning Core + Table -> Proved: mask, bias, lengths as a kernel
takes them matches Match = Proved passes + problem; Match + layout -> Way -> Replacement
found tensors and passes; functions: Meaning, Way, and the computation
"""
