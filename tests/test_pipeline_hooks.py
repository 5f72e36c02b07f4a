"""Hooks of users in stages of a pipeline: what they see and change, beside plain gradient accumulation."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import PROGRAMS, RUN, environment, good
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

import globaltensor as gt
from globaltensor.errors import GlobalTensorError
from globaltensor.pipelining import actions
from globaltensor.pipelining.stages import StageError

SEED = 23
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")   # of a first module, in plain torch too
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "bfs": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe-v": 2}


class Layer(nn.Module):
    """A weight that is used once, one that is used twice, a bias, and a parameter that is no factor of a product."""

    def __init__(self):
        super().__init__()
        self.twice, self.once, self.scale = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Parameter(torch.rand(6))

    def forward(self, x):
        return self.once(torch.tanh(self.twice(torch.tanh(self.twice(x))))) * self.scale + self.once.weight.sum()


class Log(dict):
    """By the name of what a hook is of, what it has seen, in order."""

    def note(self, name, *values):
        whole = [None if t is None else t.full_tensor() if t.is_global else t for t in values]
        self.setdefault(name, []).append([None if t is None else t.detach().clone() for t in whole])


def of_tensors(stages, log):
    for name, p in named(stages):
        def hook(grad, name=name):
            log.note(name, grad)
            return grad.clamp(-0.02, 0.02) * 3
        yield p.register_hook(hook)


def of_one_tensor(stages, log):
    (_, p), *_ = named(stages[-1:])

    def hook(grad):
        log.note("grads so far", *(q.grad for _, q in named(stages[-1:])))
        return grad * 2
    yield p.register_hook(hook)


def behind_accumulation(stages, log):
    for name, p in named(stages):
        def hook(p, name=name):
            log.note(name, p.grad)
            p.grad.mul_(0.5)
        yield p.register_post_accumulate_grad_hook(hook)


def that_replace_gradients(stages, log):
    for name, p in named(stages):
        def hook(p, name=name):
            log.note(name, p.grad)
            p.grad = p.grad.clamp(-0.02, 0.02)
        yield p.register_post_accumulate_grad_hook(hook)


def of_many_tensors(stages, log):
    for k, stage in enumerate(stages):
        yield register_multi_grad_hook(list(stage.parameters()), lambda grads, k=k: log.note(k, *grads))


def of_any_tensor(stages, log):
    for k, stage in enumerate(stages):
        yield register_multi_grad_hook(list(stage.parameters()), lambda grad, k=k: log.note(k), mode="any")


def behind_modules(stages, log):
    for k, stage in enumerate(stages):
        for name, module in stage.named_modules():
            def hook(module, into, out, name=(k, name)):
                own = list(module.parameters(recurse=False))
                log.note(name, *out, *(p.grad for p in own))
                for p in own:
                    if p.grad is not None:
                        p.grad.mul_(0.5)
            yield module.register_full_backward_hook(hook)


def before_modules(stages, log):
    for k, stage in enumerate(stages):
        for name, module in stage.named_modules():
            def hook(module, out, name=(k, name)):
                log.note(name, *out, *(p.grad for p in module.parameters()))
            yield module.register_full_backward_pre_hook(hook)


def of_every_module(stages, log):
    names = {module: (k, name) for k, stage in enumerate(stages) for name, module in stage.named_modules()}

    def hook(module, into, out):
        if module in names:
            log.note(names[module], *out, *(p.grad for p in module.parameters(recurse=False)))
    yield nn.modules.module.register_module_full_backward_hook(hook)


HOOKS = [of_tensors, of_one_tensor, behind_accumulation, that_replace_gradients, of_many_tensors, of_any_tensor,
         behind_modules, before_modules, of_every_module]


def named(stages):
    return [(f"{k}.{name}", p) for k, stage in enumerate(stages) for name, p in stage.named_parameters()]


def two_steps(stages, hooks, step, log):
    """Of which the second adds to the gradients of the first; without its hooks again a third."""
    handles = list(hooks(stages, log))
    try:
        step()
        step()
    finally:
        for handle in handles:
            handle.remove()
    step()


def by_hand(stages, hooks, x, y, micro_batches):
    model, log = nn.Sequential(*stages), Log()

    def step():
        for a, b in zip(x.chunk(micro_batches), y.chunk(micro_batches)):
            (F.mse_loss(model(a), b) / micro_batches).backward()
    two_steps(stages, hooks, step, log)
    return log


def same(stages, plain, log, want):
    assert log.keys() == want.keys()
    for name, seen in want.items():
        assert len(log[name]) == len(seen), f"{name}: once per micro-batch"
        torch.testing.assert_close(log[name], seen, rtol=1e-10, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")
    for (name, p), (_, q) in zip(named(stages), named(plain)):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-13, msg=name)


@pytest.fixture(autouse=True)
def seeded():
    print(f"seed {SEED}")
    torch.manual_seed(SEED)


@pytest.mark.sample(3)
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("name, early", [*((name, False) for name in CHUNKS), ("1f1b", True), ("zb-v", True)])
def test_hooks_see_what_those_of_plain_torch_see(name, hooks, early):
    """`early`: they are there before gt.pipeline."""
    stages = [Layer().double() for _ in range(2 * CHUNKS[name])]
    plain, log = copy.deepcopy(stages), Log()
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    want = by_hand(plain, hooks, x, y, 4)
    early = early and hooks is not of_many_tensors                 # which is refused, see below
    handles = list(hooks(stages, log)) if early else []
    runner = gt.pipeline(stages, [gt.placement("cpu", [r]) for r in range(2)], name, 4, F.mse_loss)
    two_steps(stages, lambda *_: handles if early else hooks(stages, log), lambda: runner.step(x, y), log)
    same(stages, plain, log, want)


# Under ZeRO 3 by layer a parameter is gathered by a node of the graph: other gradients than its own come later.
READ_OTHERS = of_one_tensor, behind_modules, of_every_module


@pytest.mark.sample(3)
@pytest.mark.parametrize("name, zero, recompute, hooks", [
    (name, zero, recompute, hooks)
    for name, zero, recompute in [("gpipe", 0, False), ("gpipe", 2, True), ("1f1b", 0, True), ("zb-h1", 0, False),
                                  ("zb-h1", 1, True), ("zb-h1", 2, False), ("zb-h1", 3, False), ("1f1b", "layer", True)]
    for hooks in HOOKS if zero != "layer" or hooks not in READ_OTHERS])
def test_hooks_of_stages_on_several_ranks(name, hooks, zero, recompute):
    stages = [Layer().double() for _ in range(2)]
    plain, log = copy.deepcopy(stages), Log()
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    want = by_hand(plain, hooks, x, y, 2)
    places = [gt.placement("cpu", ranks, ("dp",)) for ranks in ([0, 1], [2, 3])]
    runner = gt.pipeline(stages, places, name, 2, F.mse_loss, recompute=recompute)
    model = nn.ModuleList(stages)
    if zero:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gt.zero(optimizer, "dp", 3, model=model) if zero == "layer" else gt.zero(optimizer, "dp", zero)
    two_steps(stages, hooks, lambda: runner.step(x, y), log)
    same(stages, plain, log, want)


@pytest.mark.long
@pytest.mark.processes
def test_processes_with_hooks():
    """Also of stages that other processes run it is known which parameters have gradients."""
    good([*RUN, "-n", 4, PROGRAMS / "pipeline_hooks.py"], environment())


def test_only_stages_with_hooks_run_their_backward_pass_in_one_piece(monkeypatch):
    """And only as long as these are there."""
    stages = [Layer().double() for _ in range(4)]
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    runner = gt.pipeline(stages, [gt.placement("cpu", [r]) for r in range(4)], "zb-h1", 4, F.mse_loss)
    counts, whole = [], actions.backward_weight
    monkeypatch.setattr(actions, "backward_weight", lambda deferred: (counts.append(len(deferred)), whole(deferred)))
    runner.step(x, y)
    in_parts, counts[:] = sorted(counts), []
    assert set(in_parts) == {3}, "the products of a stage"
    handle = stages[2].once.weight.register_hook(lambda grad: None)
    runner.step(x, y)
    assert sorted(counts) == sorted([0] * 4 + in_parts[4:])
    handle.remove()
    counts.clear()
    runner.step(x, y)
    assert sorted(counts) == in_parts


@pytest.mark.parametrize("name, last", [("1f1b", 1), ("zb-v", 3)], ids=["other ranks", "the same rank"])
def test_hooks_on_what_stages_share_are_refused(name, last):
    stages = [nn.Linear(6, 6, bias=False) for _ in range(2 * CHUNKS[name])]
    stages[last].weight = stages[0].weight
    runner = gt.pipeline(stages, [gt.placement("cpu", [r]) for r in range(2)], name, 4, F.mse_loss)
    x, y = torch.randn(2, 8, 6)
    handle = stages[0].weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(StageError, match=f"a hook on weight, which stages 0 and {last} share"):
        runner.step(x, y)
    runner.eval(x, y)
    handle.remove()
    runner.step(x, y)


class Parts(nn.Module):
    """A model whose parts torch.fx would take apart."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Layer(), Layer(), Layer()

    def forward(self, x):
        return self.third(self.second(self.first(x)))


@pytest.mark.parametrize("hooks", [behind_modules, before_modules])
def test_modules_with_backward_hooks_are_not_taken_apart(hooks):
    """Nor are those with hooks around their forward pass."""
    model = Parts().double()
    plain, log = copy.deepcopy(model), Log()
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    want = by_hand(list(plain.children()), hooks, x, y, 4)
    handles = list(hooks(list(model.children()), log))
    runner = gt.pipeline(model, [gt.placement("cpu", [r]) for r in range(2)], "1f1b", 4, F.mse_loss)
    two_steps(list(model.children()), lambda *_: handles, lambda: runner.step(x, y), log)
    same(list(model.children()), list(plain.children()), log, want)


@pytest.mark.parametrize("make_global", [
    lambda m: gt.to_global(m, gt.placement("cpu", [0]), gt.sbp.broadcast),
    lambda m: gt.parallelize(m, gt.placement("cpu", [0])),
    lambda m: gt.pipeline([m, nn.Linear(3, 3)], [gt.placement("cpu", [r]) for r in range(2)], "1f1b"),
], ids=["to_global", "parallelize", "pipeline"])
def test_a_hook_of_several_plain_parameters_is_not_lost(make_global):
    """torch's own looks for the plain parameters in each backward pass, and would never run."""
    module = nn.Linear(3, 3)
    handle = register_multi_grad_hook(list(module.parameters()), lambda grads: None)
    with pytest.raises(GlobalTensorError, match="register_multi_grad_hook after module.to_global"):
        make_global(module)
    handle.remove()
    make_global(module)
    assert all(p.is_global for p in module.parameters())
