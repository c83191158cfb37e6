"""Finds attention in a program, proves that it is one, and puts kernels in its place.

find       Program -> Found: contractions of scores, mix and gradients, and their dims
sides      masks and biases that enter, by what they are made of
infer      Found -> Meaning: scale, mask, soft cap, bias; then the proof, by numbers
graft      Meaning + a way to compute it -> what `cfp.program.replace` puts in place
"""
