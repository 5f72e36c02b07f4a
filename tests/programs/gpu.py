"""What only a GPU shows: streams, graphs, torch.compile's kernels, autocast and loss scaling, running out of memory.

Four ranks share the first GPU where the host has fewer (GLOBALTENSOR_SHARE_GPU=1). Oracle: plain torch on that GPU.
Prints the name of each check that passed; `gpu.py NAME...` runs some.
"""
from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import globaltensor as gt
from globaltensor.runtime import device_kernels

SEED = 20_261_126
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
torch.backends.cudnn.allow_tf32 = False
gt.init(ranks=4)
TWO, GRID = gt.placement("cuda", [0, 1]), gt.placement("cuda", [[0, 1], [2, 3]], ("dp", "tp"))
PLAN = {"0.*": {"tp": S(0)}, "2.weight": {"tp": S(1)}, "*": B}


def same(got: torch.Tensor, want: torch.Tensor, what: object = "", **tolerance: float) -> None:
    got = got.full_tensor() if got.is_global else got
    torch.testing.assert_close(got.cpu(), want.cpu(), msg=lambda text: f"{what}: {text}", **tolerance)


def network(width: int = 64) -> nn.Module:
    torch.manual_seed(SEED)
    layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width)]
    return nn.Sequential(*layers).cuda()


def both(width: int = 64) -> tuple[nn.Module, nn.Module]:
    plain = network(width)
    return plain, gt.to_global(copy.deepcopy(plain), GRID, PLAN)


def batch(rows: int = 24, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, width, device="cuda", generator=torch.Generator("cuda").manual_seed(SEED))
    return x, gt.from_full(x, GRID, {"dp": S(0)})


def gradients_are_the_same(plain: nn.Module, model: nn.Module, **tolerance: float) -> None:
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        same(q.grad, p.grad, name, **tolerance)


def the_kernels_do_the_boxings() -> None:
    verdict = device_kernels.kernel_verdict(torch.device("cuda", 0))
    assert verdict is not None and not verdict.failed, verdict
    print(f"gpu.py: {verdict}", file=sys.stderr)


def streams_of_the_user() -> None:
    """Work on a side stream is ordered by that stream, and the memory of what died there is not taken too early."""
    side = torch.cuda.Stream()
    x = torch.randn(1 << 22, device="cuda")
    torch.cuda.synchronize()
    for k in range(20):
        with torch.cuda.stream(side):
            y = gt.from_full(x + k, TWO, S(0))
            z = (y * 2).to_global(sbp=B).to_global(sbp=S(0)) + 1
            del y
            got = z.full_tensor()
        noise = torch.full_like(x, float("nan"))     # on the default stream, in memory that is free there
        torch.cuda.current_stream().wait_stream(side)
        same(got, (x + k) * 2 + 1, k)
        del noise


def a_graph_of_a_step() -> None:
    """Forward, backward and their boxings, captured once and replayed with other numbers."""
    plain, model = both()
    x, spread = batch()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(spread).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    for parameter in model.parameters():
        parameter.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model(spread).square().mean()
        loss.backward()
        grads = [p.grad.to_global(sbp=B) for p in model.parameters()]
    for k in range(3):
        x = x + k
        for rank, shard in spread.shards.items():
            shard.copy_(x.tensor_split(2)[rank // 2])
        graph.replay()
        want = plain(x).square().mean()
        plain.zero_grad()
        want.backward()
        same(loss.detach(), want.detach(), k)
        for p, grad in zip(plain.parameters(), grads):
            same(grad, p.grad, k, rtol=1e-4, atol=1e-6)


def compiled_by_inductor() -> None:
    plain, model = both()
    x, spread = batch()
    step = torch.compile(lambda m, t: m(t).square().mean(), fullgraph=True)
    for _ in range(2):
        loss, want = step(model, spread), plain(x).square().mean()
        loss.backward()
        want.backward()
    same(loss.detach(), want.detach())
    gradients_are_the_same(plain, model, rtol=1e-4, atol=1e-6)


def a_layer_compiled_without_overhead() -> None:
    """mode="reduce-overhead": inductor puts its kernels into CUDA graphs."""
    plain, model = both()
    x, spread = batch()
    step = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        for k in range(4):
            same(step(spread * (k + 1)).clone(), plain(x * (k + 1)), k, rtol=1e-4, atol=1e-5)


def autocast_and_loss_scaling() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        pair = both()
        scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2) for _ in pair]
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in pair]
        for k in range(4):
            losses = []
            for m, t, scaler, optimizer in zip(pair, batch(), scalers, optimizers):
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype):
                    y = m(t)
                loss = y.float().square().mean()
                scaler.scale(loss * (float("inf") if k == 1 else 1.0)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
            assert abs(losses[0] - losses[1]) < 1e-2 * abs(losses[0]), (dtype, k, losses)
        assert scalers[0].get_scale() == scalers[1].get_scale(), [s.get_scale() for s in scalers]


def attended(q, k, v, mask, **options) -> list[torch.Tensor]:
    """The output, and the gradients of the operands that need one."""
    out = F.scaled_dot_product_attention(q, k, v, mask, **options)
    out.to(torch.promote_types(out.dtype, torch.float32)).square().mean().backward()
    return [out.detach(), *[t.grad for t in (q, k, v, mask) if t is not None and t.requires_grad]]


NEAR = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}      # of the largest number
def near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: object) -> None:
    same(got, want, (dtype, what), rtol=NEAR[dtype], atol=NEAR[dtype] * want.abs().max().item())


ATTENTION = [                                        # dtype, heads of keys, features, rows of queries and of keys
    (torch.bfloat16, 8, 64, 128, 128), (torch.bfloat16, 8, 64, 100, 75), (torch.bfloat16, 2, 64, 64, 64),
    (torch.bfloat16, 8, 20, 65, 65), (torch.float32, 8, 64, 128, 128), (torch.float32, 8, 32, 50, 35),
    (torch.float32, 2, 20, 33, 33), (torch.float64, 8, 16, 20, 31)]


def attention_by_the_kernels_of_torch() -> None:
    """All of its kernels: flash, cuDNN, memory-efficient and none, whatever is cut, with masks, beside torch's."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    for dtype, heads, features, rows, columns in ATTENTION:
        sizes = [(2, 8, rows, features), *2 * [(2, heads, columns, features)]]
        q, k, v = (torch.randn(size, device="cuda", generator=generator).to(dtype) for size in sizes)
        bias = torch.randn(rows, columns, device="cuda", generator=generator).to(dtype)
        seen = torch.rand(2, 1, rows, columns, device="cuda", generator=generator) < 0.7
        for mask, causal in ((None, False), (None, True), (bias, False), (seen, False)):
            options = {"is_causal": causal, "enable_gqa": heads < 8}
            want = attended(*[t.clone().requires_grad_() for t in (q, k, v)], mask, **options)
            for sbp in ({"tp": S(1)}, {"dp": S(0), "tp": S(1)}, {"tp": S(2)}, {}):
                mine = [gt.from_full(t, GRID, sbp).requires_grad_() for t in (q, k, v)]
                spread = None if mask is None else gt.from_full(mask, GRID, B)
                for a, b in zip(attended(*mine, spread, **options), want, strict=True):
                    near(a, b, dtype, (sizes, sbp, options))


def attention_with_dropout_and_trained_masks() -> None:
    q, k, v = (torch.randn(2, 4, 64, 32, device="cuda") for _ in range(3))
    bias = torch.randn(64, 64, device="cuda")
    want = attended(*[t.clone().requires_grad_() for t in (q, k, v, bias)])
    for sbp in ({"tp": S(1)}, {"dp": S(0)}, {}):
        mine = [gt.from_full(t, GRID, sbp).requires_grad_() for t in (q, k, v)]
        for a, b in zip(attended(*mine, gt.from_full(bias, GRID, B).requires_grad_()), want, strict=True):
            same(a, b, sbp, rtol=1e-4, atol=1e-6)
    drawn = []
    for sbp in ({"tp": S(1)}, {"dp": S(0)}, {}):
        torch.manual_seed(SEED)
        gt.manual_seed(SEED)
        mine = [gt.from_full(t, GRID, sbp).requires_grad_() for t in (q, k, v)]
        drawn.append([t.full_tensor() for t in attended(*mine, None, dropout_p=0.3)])
    for got in drawn[1:]:                            # the numbers do not depend on the layout
        for a, b in zip(got, drawn[0], strict=True):
            same(a, b, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(drawn[0][0], want[0], rtol=0.1)


def ring_attention() -> None:
    """Blocks of keys go around, and nothing else: what each rank receives is counted."""
    where = gt.placement("cuda", [0, 1, 2, 3], ("sp",))
    for dtype, causal, rows in itertools.product((torch.float32, torch.bfloat16), (False, True), (256, 250)):
        q, k, v = (torch.randn(2, 3, rows, 64, device="cuda").to(dtype) for _ in range(3))
        mine, own = ([t.requires_grad_() for t in ts] for ts in (
            [gt.from_full(t, where, S(2)) for t in (q, k, v)], [t.clone() for t in (q, k, v)]))
        with gt.record() as moves:
            got = attended(*mine, None, is_causal=causal)
        assert got[0].sbp == got[1].sbp == (S(2),), got[0].sbp
        received = sum(move.bytes for move in moves if "attention" in move.op)
        assert 0 < received <= 6.1 * q.nbytes * 3 / 4, (received, q.nbytes)
        for a, b in zip(got, attended(*own, None, is_causal=causal), strict=True):
            near(a, b, dtype, (causal, rows))


def images() -> None:
    """Convolutions over rows that are split, with their halo, and batch norm over a batch that is split."""
    torch.manual_seed(SEED)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                          nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)).cuda()
    model = gt.to_global(copy.deepcopy(plain), GRID, B)
    for memory in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(6, 3, 16, 12, device="cuda").to(memory_format=memory)
        outs = [plain(x), model(gt.from_full(x, GRID, {"dp": S(0), "tp": S(2)}))]
        for y in outs:
            y.square().mean().backward()
        same(outs[1].detach(), outs[0].detach(), rtol=1e-4, atol=1e-5)
    gradients_are_the_same(plain, model, rtol=1e-3, atol=1e-5)
    for (name, a), b in zip(plain.named_buffers(), model.buffers()):
        same(b, a, name, rtol=1e-4, atol=1e-5)


def a_pipeline() -> None:
    torch.manual_seed(SEED)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()
    stages = [gt.placement("cuda", [0, 1]), gt.placement("cuda", [2, 3])]
    model = copy.deepcopy(plain)
    pipe = gt.pipeline(model, stages, loss=F.mse_loss, micro_batches=4)
    x, target = torch.randn(16, 16, device="cuda"), torch.randn(16, 8, device="cuda")
    loss = pipe.step(gt.from_full(x, stages[0], S(0)), gt.from_full(target, stages[1], S(0)))
    want = F.mse_loss(plain(x), target)
    want.backward()
    same(loss.detach(), want.detach())
    gradients_are_the_same(plain, model, rtol=1e-4, atol=1e-6)


def memory_that_is_not_there() -> None:
    """torch's own error, and the GPU goes on."""
    size = 1 << 40
    try:
        gt.zeros(size, placement=TWO, sbp=S(0))
    except torch.OutOfMemoryError as error:
        assert "out of memory" in str(error)
    else:
        raise AssertionError("no error")
    x = gt.ones(8, placement=TWO, sbp=S(0))
    assert x.sum().item() == 8


def pinned_batches() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(64.0).view(32, 2), torch.arange(32))
    loader = gt.data.DataLoader(data, batch_size=8, placement=TWO, sbp=S(0), pin_memory=True, num_workers=0)
    seen = []
    for x, y in loader:
        assert x.placement.type == "cuda"
        seen += y.full_tensor().tolist()
        same(x[:, 0] / 4, y.full_tensor() / 2)
    assert seen == list(range(32)), seen


def texts_and_numbers() -> None:
    x = gt.from_full(torch.arange(6.0).view(2, 3), TWO, S(1))
    assert "cuda" in repr(x) and f"{x.sum():.1f}" == "15.0"
    assert x.device.type == "cuda" and x.is_cuda and x.sum().item() == 15
    moved = x.to_global(gt.placement("cpu", [0, 1]))
    assert moved.placement.type == "cpu" and not moved.is_cuda
    same(moved, torch.arange(6.0).view(2, 3))
    same(x.cuda(), torch.arange(6.0).view(2, 3))


def what_was_recorded() -> None:
    plain, model = both()
    _, spread = batch()
    with gt.record() as moves:
        model(spread).square().mean().backward()
        [p.grad.to_global(sbp=p.sbp) for p in model.parameters()]
    assert moves and sum(move.bytes for move in moves) > 0
    gt.metrics()
    for _ in range(3):
        model(spread).square().mean().backward()
    torch.cuda.synchronize()
    numbers = gt.metrics(tokens=1000, flops=1e9)
    assert 0 < numbers["mfu"] < 1 and numbers["tokens_per_second"] > 0, numbers
    assert numbers["peak_device_memory_bytes"] >= sum(p.nbytes for p in plain.parameters()), numbers


CHECKS: list[Callable[[], None]] = [
    the_kernels_do_the_boxings, streams_of_the_user, autocast_and_loss_scaling, attention_by_the_kernels_of_torch,
    attention_with_dropout_and_trained_masks, ring_attention, images, a_pipeline, memory_that_is_not_there,
    pinned_batches, texts_and_numbers, what_was_recorded, a_graph_of_a_step, compiled_by_inductor,
    a_layer_compiled_without_overhead]

if __name__ == "__main__":
    for check in [check for check in CHECKS if check.__name__ in sys.argv[1:] or not sys.argv[1:]]:
        check()
        print(check.__name__, flush=True)
