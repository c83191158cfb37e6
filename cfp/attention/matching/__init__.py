"""Finds attention in a program, proves that it is one, and puts kernels in its place.

find       Program -> Found: contractions of scores, mix and gradients, their dims, and
           what enters besides, as masks and biases do
infer      Found -> Meaning: scale, mask, soft cap, bias; then the proof, by numbers
called     Program -> Called: what a kernel that the step calls itself computes, one for
           each pass, read from the call: neither found nor proved
matches    Match = Found + Meaning + Problem; and Match + layout -> Way
ways       Found + Meaning + Way -> Replacement, as `cfp.program.replace` puts in place;
           of a Called see `called.replacement_of`
found      records of what is found, and the program as it is seen: Found, View
functions  Meaning; Way: a kernel, and the role of each axis; functions of replacements
"""
