"""The command line of the shell entry points, for any model of the zoo.

Sizes have the names of CFP's artifact, and by default the model's own values.
"""

import argparse
from pathlib import Path

from cfp.models import MODELS, find
from cfp_test.passes import three_passes

# The artifact's names of options, and the zoo's.
SIZES = {
    "num_layer": "layers",
    "batch_size": "batch",
    "hidden_size": "hidden",
    "seq_len": "seq",
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "ffn_size": "ffn",
    "vocab_size": "vocab",
    "num_experts": "experts",
    "expert_group_size": "expert_group_size",
}
SWITCHES = ("scan", "remat")


def add_sizes(parser: argparse.ArgumentParser, model: str | None = None) -> None:
    """Adds the options of a model, by the artifact's names; of any if it is None."""
    options = [option for one in MODELS.values() for option in one.options]
    known = {option.name: option for option in options}
    if model is not None:
        known = {option.name: option for option in find(model).options}
    for flag, name in SIZES.items():
        if name in known:
            option = known[name]
            default = "" if option.default is None else f"; {option.default} by default"
            parser.add_argument(f"--{flag}", type=int, help=f"{option.doc}{default}")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", help=known[name].doc)


def shape_of(model: str, args: argparse.Namespace) -> dict[str, int]:
    """The zoo's options of a model from what was parsed."""
    known = {option.name for option in find(model).options}
    given = {name: getattr(args, flag, None) for flag, name in SIZES.items()}
    shape = {
        name: value
        for name, value in given.items()
        if value is not None and name in known
    }
    switches = {name: getattr(args, name) for name in SWITCHES}
    return {**shape, **switches}


def main(model: str, folder: Path) -> int:
    """Runs one pass over a model as the command line says; returns the exit code.

    Args:
        model: its name in the zoo.
        folder: where results go, if the command line names no other.
    """
    parser = argparse.ArgumentParser(
        prog=f"{model}_test.sh", description=f"One pass over {find(model).doc}."
    )
    three_passes.add_options(parser, folder)
    add_sizes(parser, model)
    args = parser.parse_args()
    return three_passes.run(model, shape_of(model, args), args)
