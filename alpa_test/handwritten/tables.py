"""Rule tables: which logical dim goes to which axis of the mesh, by strategy.

A person who knows the models and the usual strategies wrote these; nothing is
searched or measured. Names of dims are those of `cfp.models.layers`.

==========================  =======================================================
data_parallel               the batch is split, all else whole on each device
zero1                       and the optimizer's state split (ZeRO-1)
fsdp                        and parameters, too: gathered before use (ZeRO-3)
megatron_tp                 heads, MLPs and vocabulary split (Shoeybi et al., 2019)
megatron_tp_sequence        and the residual stream's sequence (Korthikanti, 2022)
expert_parallel             data parallel, experts split (Lepikhin et al., 2020)
expert_parallel_fsdp        fully sharded, experts split
dp_x_tp, fsdp_x_tp          data parallel or fully sharded on x, Megatron on y
fsdp_x_tp_sequence          and the residual stream's sequence on y
hsdp                        fully sharded on y, copies on x
dp_x_ep, fsdp_x_ep          experts on y, the batch on both
ep_x_tp                     experts and the batch on x, Megatron on y
==========================  =======================================================
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cfp.models.layers import Axes, Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One strategy.

    Attributes:
      name: what it is called in tables of results.
      axes: the axes of the mesh that it is written for, in order.
      params: rules for parameters.
      activations: rules for activations and for the batch.
      optimizer: rules for the optimizer's state where they differ from `params`.
    """

    name: str
    axes: tuple[str, ...]
    params: Rules = field(default_factory=dict)
    activations: Rules = field(default_factory=dict)
    optimizer: Rules | None = None


def _data(axes: Axes) -> Rules:
    """The batch, and the groups of tokens that experts serve, over some axes."""
    return {"act_batch": axes, "act_groups": axes, "act_expert_groups": axes}


def _fully_sharded(axes: Axes) -> Rules:
    """All matrices along the width of the residual stream: every one has that dim."""
    return {"embed": axes}


def _tensor_params(axes: Axes) -> Rules:
    return {"vocab": axes, "heads": axes, "kv_heads": axes, "mlp": axes}


def _tensor(axes: Axes) -> Rules:
    return {f"act_{name}": axes for name in _tensor_params(axes)}


_SEQUENCE_X: Rules = {"act_residual_seq": "x"}
_SEQUENCE_Y: Rules = {"act_residual_seq": "y"}
_ONE = ("x",)
_TWO = ("x", "y")
_BOTH = ("x", "y")

# What works for any stack of layers.
_DENSE = (
    Table(name="data_parallel", axes=_ONE, activations=_data("x")),
    Table(
        name="zero1",
        axes=_ONE,
        activations=_data("x"),
        optimizer=_fully_sharded("x"),
    ),
    Table(name="fsdp", axes=_ONE, params=_fully_sharded("x"), activations=_data("x")),
    Table(
        name="megatron_tp",
        axes=_ONE,
        params=_tensor_params("x"),
        activations=_tensor("x"),
    ),
    Table(
        name="megatron_tp_sequence",
        axes=_ONE,
        params=_tensor_params("x"),
        activations={**_tensor("x"), **_SEQUENCE_X},
    ),
    Table(
        name="dp_x_tp",
        axes=_TWO,
        params=_tensor_params("y"),
        activations={**_data("x"), **_tensor("y")},
    ),
    Table(
        name="fsdp_x_tp",
        axes=_TWO,
        params={**_fully_sharded("x"), **_tensor_params("y")},
        activations={**_data("x"), **_tensor("y")},
    ),
    Table(
        name="fsdp_x_tp_sequence",
        axes=_TWO,
        params={**_fully_sharded("x"), **_tensor_params("y")},
        activations={**_data("x"), **_tensor("y"), **_SEQUENCE_Y},
    ),
    Table(
        name="hsdp",
        axes=_TWO,
        params=_fully_sharded("y"),
        activations=_data(_BOTH),
    ),
)

# Tokens are exchanged between the devices that hold them and those that hold their
# experts: before and behind the experts, groups are split, and experts in between.
_EXPERTS = (
    Table(
        name="expert_parallel",
        axes=_ONE,
        params={"experts": "x"},
        activations={**_data("x"), "act_experts": "x", "act_expert_groups": None},
    ),
    Table(
        name="expert_parallel_fsdp",
        axes=_ONE,
        params={"experts": "x", **_fully_sharded("x")},
        activations={**_data("x"), "act_experts": "x", "act_expert_groups": None},
    ),
    Table(
        name="dp_x_ep",
        axes=_TWO,
        params={"experts": "y"},
        activations={**_data(_BOTH), "act_experts": "y", "act_expert_groups": "x"},
    ),
    Table(
        name="fsdp_x_ep",
        axes=_TWO,
        params={"experts": "y", **_fully_sharded("x")},
        activations={**_data(_BOTH), "act_experts": "y", "act_expert_groups": "x"},
    ),
    Table(
        name="ep_x_tp",
        axes=_TWO,
        params={"experts": "x", **_tensor_params("y")},
        activations={
            **_data("x"),
            **_tensor("y"),
            "act_experts": "x",
            "act_expert_groups": None,
        },
    ),
)

TABLES: Mapping[str, tuple[Table, ...]] = MappingProxyType(
    {
        "gpt": _DENSE,
        "bert": _DENSE,
        "llama": _DENSE,
        "moe": (*_DENSE, *_EXPERTS),
    }
)


def table_of(model: str, name: str) -> Table:
    """A model's table of that name.

    Raises:
      ValueError: it has none.
    """
    for table in TABLES[model]:
        if table.name == name:
            return table
    raise ValueError(
        f"{model} has no hand-written strategy {name!r}; there are: "
        f"{', '.join(table.name for table in TABLES[model])}"
    )
