"""Configurations of the mixture of experts, as the artifact of CFP has them."""

from typing import NamedTuple


class MoEModelConfig(NamedTuple):
    """A configuration as CFP's artifact writes it, field by field."""

    seq_len: int
    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    num_experts: int
    expert_group_size: int

    def options(self) -> dict[str, int]:
        """The same as keywords of `cfp.models.build`."""
        return {
            "seq": self.seq_len,
            "hidden": self.hidden_size,
            "layers": self.num_layers,
            "heads": self.num_heads,
            "vocab": self.vocab_size,
            "experts": self.num_experts,
            "expert_group_size": self.expert_group_size,
        }


# The artifact's functionality check on 4 GPUs, each with its batch size.
SEED_CONFIGS: tuple[tuple[MoEModelConfig, int], ...] = (
    (MoEModelConfig(1024, 1280, 16, 4, 32000, 32, 2048), 32),
    (MoEModelConfig(1024, 1280, 16, 4, 32000, 32, 2048), 64),
    (MoEModelConfig(1024, 1280, 16, 2, 32000, 32, 2048), 96),
    (MoEModelConfig(1024, 1280, 16, 2, 32000, 32, 2048), 128),
)
