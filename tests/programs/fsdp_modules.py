"""The methods of FSDPModule, lists of modules and methods beside `forward`: torch's own and ours give the same.

docs/bridges.md says which of them do nothing here.
"""
from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from own_batches import MESH, RANK, Block, N, rows, whole
from torch import nn

import globaltensor as gt
import globaltensor.dtensor as ours

TUNED = {                                            # method -> arguments, called before each step
    "set_is_last_backward": (True,), "set_requires_all_reduce": (True,), "set_reshard_after_forward": (True,),
    "set_reshard_after_backward": (True,), "set_force_sum_reduction_for_comms": (True,),
    "set_unshard_in_backward": (True,), "set_reduce_scatter_unused_params": (False,), "unshard": (), "reshard": (),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.last = nn.Linear(6, 6), nn.LayerNorm(6)

    def encode(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return x * scale

    def forward(self, x):
        return self.last(self.head(self.encode(x)))

    def through_itself(self, x):
        return self(x) + self.encode(x, scale=2.0)


def sharded(T):
    torch.manual_seed(5)
    model, mesh = Model(), MESH[T]
    for block in model.blocks:
        assert T.fully_shard(block, mesh=mesh) is block and isinstance(block, T.FSDPModule)
    group = [model.head, model.last]
    assert T.fully_shard(group, mesh=mesh) is group
    T.fully_shard(model, mesh=mesh)
    for name in ("encode", "through_itself"):
        T.register_fsdp_forward_method(model, name)
    T.register_fsdp_forward_method(nn.Linear(1, 1), "forward")       # of which torch says nothing either
    assert type(model).__name__ == "FSDPModel" and isinstance(model, Model)
    return model


def trained(T, divisor):
    model, seen = sharded(T), []
    first, *_, last = model.blocks
    first.set_modules_to_forward_prefetch([last])
    last.set_modules_to_backward_prefetch([first])
    if divisor is not None:
        for part in model.modules():
            if isinstance(part, T.FSDPModule):
                part.set_force_sum_reduction_for_comms(True)         # gloo has no other
                part.set_gradient_divide_factor(divisor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        for name, arguments in TUNED.items():
            if hasattr(torch_fsdp.FSDPModule, name):
                getattr(model, name)(*arguments)
        model.unshard(async_op=True).wait()
        for micro_batch in range(2):
            model.set_requires_gradient_sync(micro_batch == 1)
            run = (model, model.encode, model.through_itself)[step]
            out = run(rows(4, 6, seed=2 * step + micro_batch))
            out.square().mean().backward()
            seen.append(out.detach().clone())
        seen += [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(whole(p).detach().clone() for p in model.parameters())]


def refused():
    """What would change how tensors are sent. Copies and parts are of the class before."""
    model = sharded(ours)
    for name, arguments in {"set_custom_all_gather": (None,), "set_custom_reduce_scatter": (None,),
                            "set_all_reduce_hook": (print,), "set_reduce_scatter_unused_params": (True,),
                            "set_gradient_divide_factor": (0,)}.items():
        try:
            getattr(model, name)(*arguments)
        except gt.ArgumentError as error:
            assert name in str(error)
        else:
            raise AssertionError(name)
    assert type(copy.deepcopy(model)) is Model and type(model.blocks[0].up) is nn.Linear
    layers = ours.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh=MESH[ours])
    assert type(layers[:1]) is nn.Sequential and isinstance(layers, ours.FSDPModule)


def main():
    for divisor in (None, 1.0, 2.0 * N):
        results = [trained(T, divisor) for T in (torch_fsdp, ours)]
        torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-6,
                                   msg=lambda text: f"divided by {divisor}, rank {RANK}: {text}")
    refused()
    dist.barrier()
    print("each method is as torch's")


if __name__ == "__main__":
    main()
