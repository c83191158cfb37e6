"""Trains a model of the zoo in PyTorch under each strategy, and writes what it took.

    torchrun --nproc-per-node 4 alpa_test/pytorch/run.py --model gpt --layers 4
        --batch 24 --dtype bfloat16 --json torch.jsonl

Sizes that are not given are those of `cfp_test/bench/configs.py`, for four devices.
Needs PyTorch, and nothing of cfp or JAX.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Model, Shape
from strategies import STRATEGIES, is_split, unsupported
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

# As in `cfp_test/bench/configs.py`, which needs JAX.
LAYERS: dict[str, dict[str, int]] = {
    "gpt": {"hidden": 4096, "heads": 32, "seq": 1024, "vocab": 51200, "batch": 24},
    "bert": {"hidden": 4096, "heads": 32, "seq": 512, "vocab": 30592, "batch": 48},
    "llama": {
        "hidden": 4096,
        "heads": 32,
        "ffn": 11008,
        "seq": 1024,
        "vocab": 32000,
        "batch": 40,
    },
    "moe": {
        "hidden": 1280,
        "heads": 4,
        "seq": 1024,
        "vocab": 32000,
        "experts": 32,
        "expert_group_size": 2048,
        "batch": 64,
    },
}
SIZES = ("hidden", "heads", "kv_heads", "ffn", "seq", "vocab", "batch", "layers")
LEARNING_RATE = 3e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=LAYERS, required=True)
    for name in (*SIZES, "experts", "expert_group_size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--strategies", help="some of them, separated by semicolons")
    parser.add_argument("--compile", choices=("both", "yes", "no"), default="both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="in one sample")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--check", action="store_true", help="against one process")
    parser.add_argument("--json", type=Path, help="append a row for each here")
    parser.add_argument("--probe", action="store_true", help="what else is installed")
    args = parser.parse_args()
    if args.probe:
        return probe()
    dist.init_process_group(args.backend)
    try:
        return _run(args)
    finally:
        dist.destroy_process_group()


def probe() -> int:
    """Says whether DeepSpeed and Megatron-core can be imported."""
    for name in ("deepspeed", "megatron.core", "transformer_engine", "flash_attn"):
        try:
            __import__(name)
            print(f"{name}: can be imported")
        except Exception as error:  # Extensions that do not load raise anything.
            print(f"{name}: {type(error).__name__}: {error}")
    return 0


def _run(args: argparse.Namespace) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    on_gpu = args.backend == "nccl"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
        # As JAX multiplies float32 on these devices by default.
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda" if on_gpu else "cpu")
    mesh = init_device_mesh(device.type, (world,))
    options = options_of(args)
    names = [
        name.strip() for name in (args.strategies or "").split(";") if name.strip()
    ]
    compiled = {"both": (False, True), "yes": (True,), "no": (False,)}[args.compile]
    for name in names or STRATEGIES:
        for with_compile in compiled:
            row = _row(args, options, name, with_compile, mesh, device)
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
            if rank == 0:
                time_ms = statistics.median(row["samples_ms"] or [float("nan")])
                print(
                    f"{row['name']}: {row['status']} {time_ms:.2f} ms {row['reason']}"
                )
                if args.json:
                    with args.json.open("a") as out:
                        out.write(json.dumps(row) + "\n")
    return 0


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the zoo that this run is of."""
    names = (*SIZES, "experts", "expert_group_size")
    given = {name: getattr(args, name) for name in names}
    found = {"layers": 4, **LAYERS[args.model]}
    found |= {name: value for name, value in given.items() if value is not None}
    return {**found, "dtype": args.dtype}


def shape_of(model: str, options: dict[str, Any]) -> Shape:
    hidden, heads = options["hidden"], options["heads"]
    return Shape(
        model=model,
        vocab=options["vocab"],
        seq=options["seq"],
        hidden=hidden,
        layers=options["layers"],
        heads=heads,
        kv_heads=options.get("kv_heads") or heads,
        ffn=options.get("ffn") or 4 * hidden,
        experts=options.get("experts", 0),
        expert_group_size=options.get("expert_group_size", 0),
    )


def _row(
    args: argparse.Namespace,
    options: dict[str, Any],
    name: str,
    with_compile: bool,
    mesh: DeviceMesh,
    device: torch.device,
) -> dict[str, Any]:
    row = {
        "model": args.model,
        "devices": mesh.size(),
        "options": options,
        "name": f"PyTorch {name}{', compiled' if with_compile else ''}",
        "mesh": f"x={mesh.size()}",
        "status": "ok",
        "reason": "",
        "samples_ms": [],
        "peak_bytes": 0,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    try:
        trainer = Trainer(args, options, name, with_compile, mesh, device)
        if args.check:
            row["losses"] = [trainer.mean_loss() for _ in range(3)]
        row["samples_ms"] = trainer.measure()
        if device.type == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
    except torch.OutOfMemoryError as error:
        row |= {"status": "out_of_memory", "reason": str(error).splitlines()[0]}
    except Unsupported as error:
        row |= {"status": "unsupported", "reason": str(error)}
    except Exception as error:  # Whatever a strategy raises is a row like any other.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        row |= {"status": "crashed", "reason": reason[:500]}
    return row


class Unsupported(Exception):
    """A strategy that a model has no form of here."""


class Trainer:
    """A model under a strategy, with its optimizer and its batch."""

    def __init__(
        self,
        args: argparse.Namespace,
        options: dict[str, Any],
        name: str,
        with_compile: bool,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.args, self.device = args, device
        self.dtype = getattr(torch, args.dtype)
        torch.manual_seed(0)
        shape = shape_of(args.model, options)
        with device:  # A billion random numbers take a CPU half a minute.
            model = Model(shape)
        problem = unsupported(name, model)
        if problem:
            raise Unsupported(problem)
        self.model = model
        self.wrapped = STRATEGIES[name](model, mesh, self.dtype)
        if with_compile:
            for layer in model.layers:
                # The forward pass alone: FSDP's hooks around it stay as they are.
                layer.forward = torch.compile(layer.forward)
        whole, split = [], []
        for parameter in model.parameters():
            (split if isinstance(parameter, DTensor) else whole).append(parameter)
        self.optimizer = torch.optim.AdamW(
            # Fused kernels take no mixture of whole parameters and split ones.
            [{"params": some} for some in (whole, split) if some],
            lr=LEARNING_RATE,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=1e-4,  # As optax.adamw has it.
            fused=device.type == "cuda" or None,
        )
        torch.manual_seed(1)
        batch, seq = options["batch"], options["seq"]
        text = torch.randint(0, options["vocab"], (batch, seq + 1))
        if is_split(name):
            mine = text
        else:
            mine = text.chunk(mesh.size())[mesh.get_rank()]
        self.tokens = mine[:, :-1].contiguous().to(device)
        self.labels = mine[:, 1:].contiguous().to(device)
        # BERT guesses some of the tokens, the others the next one each.
        share = 0.15 if args.model == "bert" else 1.0
        mask = torch.rand(self.labels.shape) < share
        self.weights = (mask / mask.sum()).flatten().to(device)

    def step(self) -> torch.Tensor:
        """One training step; the loss."""
        lowers = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=lowers):
            logits = self.wrapped(self.tokens, self.dtype)
            logits, labels = logits.flatten(0, 1).float(), self.labels.flatten()
            losses = F.cross_entropy(logits, labels, reduction="none")
            loss = (losses * self.weights).sum() + self.model.penalty()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def mean_loss(self) -> float:
        """One training step; the loss over all processes' shares of the batch."""
        loss = self.step().double()
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()

    def measure(self) -> list[float]:
        """Milliseconds of a step, several samples, after a warm-up."""
        self._sample(2)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        spent = 0.0
        while spent < self.args.warmup:
            spent += self._sample(self.args.steps) * self.args.steps / 1000
        return [self._sample(self.args.steps) for _ in range(self.args.rounds)]

    def _sample(self, steps: int) -> float:
        """Milliseconds of one step, as process 0 saw it: all decide alike."""
        self._wait()
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._wait()
        took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        took = took.to(self.device)
        dist.broadcast(took, 0)
        return float(took) * 1000 / steps

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


if __name__ == "__main__":
    raise SystemExit(main())
