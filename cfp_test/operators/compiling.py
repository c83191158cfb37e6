"""Compiling in these tests."""

import jax

# Compiles in less than half of the time. Newer releases have no such option any more.
SOON = (
    {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else None
)
