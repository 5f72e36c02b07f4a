"""A training loop in torchtitan's shape on dp x tp ranks: a job's config, a plan of torch's styles, and a Trainer.

    python examples/titan.py                                    one process drives all ranks
    globaltensor run -n 4 examples/titan.py                     one process per rank
    globaltensor run -n 4 examples/titan.py --load              goes on where the last one was ended

Five lines are numbered: torchtitan calls parallelize_module, fully_shard and torch.distributed.checkpoint there, as the
comment behind each says. `--plain` runs the loop on one device. torchtitan itself need not be installed.
"""
from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

import globaltensor as gt


@dataclass
class Model:
    vocab: int = 96
    dim: int = 32
    layers: int = 2
    heads: int = 4


@dataclass
class Training:
    steps: int = 6
    global_batch_size: int = 8
    local_accumulation: int = 2
    seq_len: int = 16
    max_norm: float = 1.0
    lr: float = 1e-2
    warmup_steps: int = 2
    seed: int = 5


@dataclass
class Parallelism:
    data_parallel_shard_degree: int = 2
    tensor_parallel_degree: int = 2
    enabled: bool = True


@dataclass
class Checkpoint:
    folder: str = "titan-out"
    interval: int = 2
    load: bool = False


@dataclass
class JobConfig:
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


# --------------------------------------------------------------------------------------------------------- the model


class Attention(nn.Module):
    def __init__(self, args: Model) -> None:
        super().__init__()
        self.head = args.dim // args.heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(args.dim, args.dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (linear(x).view(b, s, -1, self.head).transpose(1, 2) for linear in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self, args: Model) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(args.dim, 3 * args.dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * args.dim, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, args: Model) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(args.dim), nn.RMSNorm(args.dim)
        self.attention, self.feed_forward = Attention(args), FeedForward(args)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, args: Model) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.layers))
        self.norm, self.output = nn.RMSNorm(args.dim), nn.Linear(args.dim, args.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


# ------------------------------------------------------------------------------------------------------- parallelism


def parallelize_llama(model: nn.Module, mesh: Any) -> nn.Module:
    """torchtitan's plan: the sequence is split between the layers, and gathered for them."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": whole,
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": whole,
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    return gt.parallelize(model, mesh, gt.Plan.of_styles(model, plan))       # 1: parallelize_module(model, mesh, plan)


class Trainer:
    """The loop, and what it has to remember."""

    def __init__(self, job: JobConfig) -> None:
        self.job, self.step = job, 0
        self.losses: list[float] = []
        ranks = job.parallelism.data_parallel_shard_degree, job.parallelism.tensor_parallel_degree
        torch.manual_seed(job.training.seed)
        self.model: nn.Module = Transformer(job.model)
        if job.parallelism.enabled:
            self.mesh = gt.placement("cpu", torch.arange(ranks[0] * ranks[1]).view(ranks).tolist(), ("dp", "tp"))
            parallelize_llama(self.model, self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=job.training.lr)
        if job.parallelism.enabled:
            gt.zero(self.optimizer, "dp", 3, self.model)                     # 2: fully_shard(layer, mesh=mesh["dp"])
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / job.training.warmup_steps, 1.0))

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets: rows of one text, by their number."""
        args = self.job.training
        rows = args.global_batch_size // args.local_accumulation
        text = torch.randint(self.job.model.vocab, (rows, args.seq_len + 1),
                             generator=torch.Generator().manual_seed(number))
        if self.job.parallelism.enabled:
            text = gt.from_full(text, self.mesh, {"dp": gt.sbp.split(0)})    # 3: text.chunk(dp)[dp_rank]
        return text[:, :-1], text[:, 1:]

    def train_step(self) -> float:
        args, total = self.job.training, 0.0
        self.optimizer.zero_grad()
        for k in range(args.local_accumulation):
            inputs, targets = self.batch(self.step * args.local_accumulation + k)
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten()) / args.local_accumulation
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), args.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        return total

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "step": self.step,
                "losses": self.losses}

    def train(self, ends_at: int = 0) -> list[float]:
        """The losses of all steps, those of a job that is gone on with too."""
        checkpoint = self.job.checkpoint
        if checkpoint.load:
            state = gt.load(self.state(), checkpoint.folder)                 # 4: dcp.load(state, ...)
            self.step, self.losses = state["step"], state["losses"]
        while self.step < self.job.training.steps:
            self.losses.append(self.train_step())
            self.step += 1
            if self.step % checkpoint.interval == 0 and self.job.parallelism.enabled:
                gt.save(self.state(), checkpoint.folder)                     # 5: dcp.save(state, ...)
            if self.step == ends_at:
                os._exit(3)                          # as if the machine had been taken away
        return self.losses


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a small Llama by a loop like torchtitan's.")
    parser.add_argument("--out", default="titan-out")
    for name, default in ("dp", 2), ("tp", 2), ("steps", 6), ("kill", 0):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in "plain", "load":
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args(argv)
    job = JobConfig(training=Training(steps=options.steps),
                    parallelism=Parallelism(options.dp, options.tp, not options.plain),
                    checkpoint=Checkpoint(options.out, load=options.load))
    return Trainer(job).train(options.kill)


if __name__ == "__main__":
    result = main()
    if gt.rank() == 0:
        print(result)
