r"""The cost-model baseline: communication is modelled, and nothing is measured.

The formulation is that of Alpa's intra-operator pass (Zheng et al., "Alpa: Automating
Inter- and Intra-Operator Parallelism for Distributed Deep Learning", OSDI 2022, section
4), solved over cfp's blocks in place of single operators:

    minimise    sum_v s_v^T (c_v + d_v)  +  sum_(u,v) s_u^T R_uv s_v
    subject to  s_v is one-hot                            for each node v
                sum_v s_v^T m_v <= M                      (optional)

A node is a block with the parameters that it reads first, and s_v picks its strategy
and how those parameters are stored. c_v is compute: ignored, as in Alpa, or FLOPs over
a rate. d_v is communication inside: reductions, gathers of parameters, reductions of
gradients. R_uv is resharding of what passes between two nodes. All communication is
alpha + beta * bytes, by the kind of collective. m_v is memory at the turn from the
forward to the backward pass, where most is alive: state, and values kept.

As in Alpa, heavy operators are never replicated: of a block's strategies only those
take part that split it over every axis, where it has any. (With compute ignored,
replicating everything would cost nothing.)

What differs from Alpa: nodes are blocks, found by Shardy's rules; parameter storage is
part of the choice, where Alpa makes parameters nodes of their own and rewrites
all-reduces into reduce-scatters afterwards; memory is counted at one moment. As in
cfp are the program, the mesh, the blocks and their strategies, how a choice becomes
constraints, and the compiler. No measured segment is used.
"""

from alpa_test.cost_model.communication import LINKS, AlphaBeta, fit
from alpa_test.cost_model.formulation import Formulation, formulate
from alpa_test.cost_model.ilp import Modelled, choose

__all__ = [
    "LINKS",
    "AlphaBeta",
    "Formulation",
    "Modelled",
    "choose",
    "fit",
    "formulate",
]
