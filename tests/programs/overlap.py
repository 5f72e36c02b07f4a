"""Gradients that are reduced while backward goes on: every process compares them with those reduced all at once.

`overlap.py FOLDER [TYPE]`: on the CPU, or on devices that stand in for others, with an engine of their own.
"""
import gc
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

TYPE = sys.argv[2] if len(sys.argv) > 2 else "cpu"
if TYPE != "cpu":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import stand_in_engine
    stand_in_engine.provide(TYPE)

import globaltensor as gt  # noqa: E402
from globaltensor.boxings import redistribute  # noqa: E402
from globaltensor.parallel import write_behind, zero3  # noqa: E402
from globaltensor.runtime import collectives  # noqa: E402
from globaltensor.runtime.machine import Machine  # noqa: E402
from globaltensor.tensors import gradients  # noqa: E402

SEED = 20_261_124
WIDTH, LAYERS, STEPS = 256, 6, 4


def train(where, times_latency, micro_batches=1, stage=0, drop=False, record=False):
    """The parameters after some steps, and how many buckets were begun in each. `record`: by rank 0 alone."""
    gradients.TIMES_LATENCY, gradients._buckets = times_latency, gradients.BackwardBuckets()
    torch.manual_seed(SEED)
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    gt.to_global(net, where, gt.sbp.broadcast)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = gt.zero(optimizer, stage=stage) if stage else optimizer
    begun, generator = [], torch.Generator().manual_seed(SEED)
    held = {p: next(iter(p.shards.values())).data_ptr() for p in net.parameters()}
    written = [p._version for p in net.parameters()]
    for step in range(STEPS):
        with gt.record() if record and gt.rank() == 0 else nullcontext() as moves:
            for _ in range(micro_batches if step != STEPS - 1 else 2):         # twice in the last step, unforeseen
                x = gt.from_full(torch.randn(16, WIDTH, generator=generator), where, gt.sbp.split(0))
                net(x).square().mean().backward()
            begun.append(len(gradients._buckets.under_way))
            if moves is not None:
                check_watch(net, moves, step != STEPS - 1)
        if drop and step == 1:
            optimizer.zero_grad()                    # what is under way is for nobody
            continue
        optimizer.step()
        optimizer.zero_grad()
        before, written = written, [p._version for p in net.parameters()]
        assert all(old < new for old, new in zip(before, written)), (before, written)
    assert all(next(iter(p.shards.values())).data_ptr() == at for p, at in held.items())
    return [p.full_tensor() for p in net.parameters()], begun


def train_by_layers(where, ahead, again):
    """ZeRO 3: the parameters after some steps, the losses, and how many layers were begun ahead in each step; a
    parameter is written to between two layers in some of them. `again`: layers are recomputed."""
    torch.manual_seed(SEED)
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    gt.to_global(net, where, gt.sbp.broadcast)
    optimizer = gt.zero(torch.optim.Adam(net.parameters(), lr=0.01), stage=3, model=net)
    begun, losses, generator = [], [], torch.Generator().manual_seed(SEED)
    begin, link = zero3.BegunLayers, zero3.link_seconds
    zero3.BegunLayers = lambda layers: (begun.extend(layers), begin(layers))
    zero3.link_seconds = link if ahead else lambda *_: None
    # net[2] is begun by then; in backward it is not written to again
    double = net[1].register_forward_hook(lambda *_: None if again else double_it(net[2].weight))
    for step in range(STEPS):
        before = len(begun)
        x = gt.from_full(torch.randn(16, WIDTH, generator=generator), where, gt.sbp.split(0))
        for layer in net:
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((len(begun) - before, loss.full_tensor().item()))
        if step == 1:
            double.remove()
            with torch.no_grad():
                for layer in net[:3]:                # the fourth is begun, and not run
                    x = layer(x)
    zero3.BegunLayers, zero3.link_seconds = begin, link
    return [p.full_tensor() for p in net.parameters()], losses


def check_small_layers(where):
    """A norm is gathered in one move with what comes behind it, in forward and in backward, and small layers together
    until they are not small."""
    for net, wanted in (([WIDTH, 0, WIDTH, 0, WIDTH], [["1", "2"], ["3", "4"], ["3", "2"], ["1", "0"]]),
                        ([WIDTH, 0, 0, 0, WIDTH], [["1", "2", "3", "4"], ["3", "2", "1", "0"]])):
        torch.manual_seed(SEED)
        net = torch.nn.Sequential(*(torch.nn.Linear(n, n) if n else torch.nn.LayerNorm(WIDTH) for n in net))
        gt.to_global(net, where, gt.sbp.broadcast)
        gt.zero(torch.optim.SGD(net.parameters(), lr=0.1), stage=3, model=net)
        names, begun, gathering = {module: name for name, module in net.named_children()}, [], zero3.BegunLayers
        zero3.BegunLayers = lambda layers: (begun.append([names[one.module] for one in layers]), gathering(layers))
        net(gt.ones(4, WIDTH, placement=where, sbp=gt.sbp.split(0))).sum().backward()
        zero3.BegunLayers = gathering
        assert begun == wanted, begun


def check_dropped(where):
    """What was begun may be dropped, as with a model: messages need their memory until they are done."""
    ranks = tuple(range(gt.world_size()))
    for tag in range(8, 24, 8):
        row = torch.ones(2_000_000, device=TYPE)
        begun = collectives.begin_collectives(
            [collectives.Collective("all_gather", ranks, row, row.new_empty(len(ranks) * len(row)))], "nobody", tag)
        del row, begun
        gc.collect()
        x = gt.from_full(torch.arange(40.0), where, gt.sbp.split(0))
        assert torch.equal(x.full_tensor().cpu(), torch.arange(40.0))


def double_it(weight):
    with torch.no_grad():
        weight *= 2


def copied_again(tensors, _):
    raise AssertionError(f"gathered parameters came in other memory: {[list(t.shape) for t in tensors]}")


def check_watch(net, moves, each_once):
    """The watch sees the reduction when gradients are read, as one boxing, and may forbid it then."""
    first = next(net.parameters())
    del moves[:]
    try:
        with gt.boxing("forbid"):
            print(first.grad)
    except gt.BoxingError:
        pass
    else:
        raise AssertionError("it was not forbidden")
    assert first.grad.sbp == (gt.sbp.broadcast,) and len(moves) == 1, moves
    assert moves[0].op == "gradient" and set(moves[0].calls) == {"all_reduce"}, moves
    if each_once:
        assert moves[0].tensors == 2 * LAYERS and moves[0].bytes == sum(p.nbytes for p in net.parameters()), moves


def check_threads():
    """What serves gloo's connections, in the group of all ranks and in that of the buckets, takes no core from others,
    which Linux can be told."""
    policies = [os.sched_getscheduler(int(thread.name)) for thread in Path("/proc/self/task").glob("*")
                if (thread / "comm").read_text().startswith("gloo")]
    assert len(policies) == 2 and set(policies) == {os.SCHED_BATCH}, policies


def main(folder):
    gt.init(machine=Machine(latency=5e-5, bandwidth=1e9) if TYPE != "cpu" else None)   # a model so small, a slow link
    where, seen = gt.placement.all(TYPE), {}
    redistribute.BEGINNING = 0
    write_behind.foreach_copy_ = copied_again
    for name, how in {"plain": {}, "micro-batches": {"micro_batches": 2}, "zero": {"stage": 2},
                      "dropped": {"drop": True}, "recorded by one": {"record": True}}.items():
        at_once, none = train(where, float("inf"), **how)
        bucket_wise, seen[name] = train(where, 1, **how)
        assert none == [0] * STEPS, none
        for a, b in zip(at_once, bucket_wise, strict=True):
            assert torch.equal(a, b), f"{name}: {(a - b).abs().max()}"
    for again in (False, True):
        at_once, losses = train_by_layers(where, False, again)
        ahead, others = train_by_layers(where, True, again)
        assert [loss for _, loss in losses] == [loss for _, loss in others], (losses, others)
        assert not sum(n for n, _ in losses), losses
        both = 2 * (LAYERS - 1)                      # forward and backward
        assert [n for n, _ in others] == [both, both, both - 1, both], others
        for a, b in zip(at_once, ahead, strict=True):
            assert torch.equal(a, b), f"ZeRO 3: {(a - b).abs().max()}"
    check_small_layers(where)
    check_dropped(where)
    if sys.platform == "linux" and TYPE == "cpu":
        check_threads()
    Path(folder, f"{gt.rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
