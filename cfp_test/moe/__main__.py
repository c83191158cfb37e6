"""GShard's mixture of experts, pass by pass; see `moe_test.sh`."""

import argparse
from pathlib import Path

from cfp_test.moe.configs import MoEModelConfig
from cfp_test.passes import three_passes

DEFAULT = MoEModelConfig(1024, 1280, 16, 4, 32000, 32, 2048)


def main() -> int:
    parser = argparse.ArgumentParser(prog="moe_test.sh", description=__doc__)
    three_passes.add_options(parser, Path(__file__).parent)
    parser.add_argument("--num_layer", type=int, default=DEFAULT.num_layers)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--hidden_size", type=int, default=DEFAULT.hidden_size)
    parser.add_argument("--seq_len", type=int, default=DEFAULT.seq_len)
    parser.add_argument("--num_heads", type=int, default=DEFAULT.num_heads)
    parser.add_argument("--vocab_size", type=int, default=DEFAULT.vocab_size)
    parser.add_argument("--num_experts", type=int, default=DEFAULT.num_experts)
    parser.add_argument(
        "--expert_group_size", type=int, default=DEFAULT.expert_group_size
    )
    args = parser.parse_args()
    config = MoEModelConfig(
        args.seq_len,
        args.hidden_size,
        args.num_layer,
        args.num_heads,
        args.vocab_size,
        args.num_experts,
        args.expert_group_size,
    )
    return three_passes.run("moe", {**config.options(), "batch": args.batch_size}, args)


if __name__ == "__main__":
    raise SystemExit(main())
