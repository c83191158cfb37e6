"""Finds attention in a program, proves that it is one, and puts kernels in its place.

values     which values are equal, by all that they depend on
region     Program -> Region: all that is computed of scores, by a closed list of ops
core       Region -> Steps -> Core of each pass: steps on arrays of named dims
proof      Core -> Table: the softmax's argument by states of masks; then the proof
meaning    Core + Table -> Proved: mask, bias, lengths as a kernel takes them
matches    Match = Proved passes + problem; Match + layout -> Way -> Replacement
functions  Meaning, Way, and what is computed
"""
