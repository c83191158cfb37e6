"""DDP, FSDP2 and tensor parallelism for `models.Model`, and which models they take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from models import Experts, Model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

Wrap = Callable[[Model, DeviceMesh, torch.dtype], nn.Module]


def ddp(model: Model, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """Copies everywhere; gradients summed in buckets while others are computed."""
    del dtype
    device = next(model.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(
        model,
        device_ids=ids,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
    )


def fsdp(model: Model, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """Everything sharded, a layer gathered at a time (ZeRO-3)."""
    return _fully_shard(model, mesh, dtype, reshard=True)


def fsdp_keep(model: Model, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """Sharded, but kept gathered from forward to backward pass (ZeRO-2)."""
    return _fully_shard(model, mesh, dtype, reshard=False)


def _fully_shard(
    model: Model, mesh: DeviceMesh, dtype: torch.dtype, *, reshard: bool
) -> nn.Module:
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def tensor_parallel(model: Model, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """Megatron: heads, MLPs and the vocabulary split."""
    return _tensor(model, mesh, sequence=False)


def tensor_sequence(model: Model, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """Megatron, and the residual stream's sequence split."""
    return _tensor(model, mesh, sequence=True)


def _tensor(model: Model, mesh: DeviceMesh, *, sequence: bool) -> nn.Module:
    stream = Shard(1) if sequence else Replicate()
    top = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    if sequence:
        top["final_norm"] = SequenceParallel()
    parallelize_module(model, mesh, top)
    for layer in model.layers:
        plan = {
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=stream),
            "mlp.up": ColwiseParallel(),
            "mlp.gate": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=stream),
        }
        if sequence:
            whole = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            norms = SequenceParallel()
            plan |= {"attention_norm": norms, "mlp_norm": norms}
            plan |= {"attention": whole, "mlp": whole}
        names = {name for name, _ in layer.named_modules()}
        parallelize_module(
            layer, mesh, {name: style for name, style in plan.items() if name in names}
        )
    return model


STRATEGIES: dict[str, Wrap] = {
    "DDP": ddp,
    "FSDP2": fsdp,
    "FSDP2, kept gathered": fsdp_keep,
    "TP": tensor_parallel,
    "TP, sequence": tensor_sequence,
}


def unsupported(name: str, model: Model) -> str:
    """Returns the reason why a strategy does not take a model; "" if it does."""
    split = name.startswith("TP")
    if split and any(isinstance(layer.mlp, Experts) for layer in model.layers):
        return "torch.distributed.tensor.parallel has no style for these expert layers"
    if split and model.shape.model == "bert":
        return "the head reads the token table, which a style cannot split for both"
    if name == "TP, sequence" and model.shape.model != "llama":
        return "learned positions are added to a stream that is split already"
    return ""


def is_split(name: str) -> bool:
    """Returns True if each process takes all of the batch."""
    return name.startswith("TP")
