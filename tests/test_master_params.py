"""A parameter and the part that ZeRO's optimizer steps in its place read like one tensor, whoever writes to which."""
from __future__ import annotations

import copy
import gc
import weakref
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from shards import place
from torch import nn

import globaltensor as gt
from globaltensor.errors import GlobalTensorError, SbpError
from globaltensor.runtime.agreement import broadcast_object
from globaltensor.tensors import gradients

SEED = 23
S, B = gt.sbp.split, gt.sbp.broadcast
PLACES = {"2": ([0, 1], ("dp",)), "3": ([0, 1, 2], ("dp",)), "2 x tp 2": ([[0, 1], [2, 3]], ("dp", "tp"))}
ROWS = {"0.*": {"tp": S(0)}, "2.weight": {"tp": S(1)}}


def net():
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def both(name, optimizer, stage):
    """(net, batch, optimizer), plain and under ZeRO."""
    where = place(*PLACES[name])
    plain, x = net(), torch.randn(5, 6).double()
    model = gt.parallelize(copy.deepcopy(plain), where, ROWS if "tp" in where.axis_names else {})
    lies = {axis: S(0) for axis in where.axis_names if axis == "dp"}
    ours = gt.zero(optimizer(model.parameters()), stage=stage)
    return (plain, x, optimizer(plain.parameters())), (model, gt.from_full(x, where, lies), ours)


def loss_of(model, x):
    return model(x).pow(2).mean()


def closure_of(model, x, optimizer, losses):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        losses.append(loss.item())
        return loss
    return closure


def of_groups(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def lbfgs(model, x, optimizer, losses):
    optimizer.step(closure_of(model, x, optimizer, losses))


def sam(model, x, optimizer, losses):
    """Foret et al., arXiv:2010.01412: a step by the gradient at a point near by."""
    closure = closure_of(model, x, optimizer, losses)
    closure()
    with torch.no_grad():
        steps = [0.1 * p.grad for p in of_groups(optimizer)]
        for p, step in zip(of_groups(optimizer), steps):
            p.add_(step)
    closure()
    with torch.no_grad():
        for p, step in zip(of_groups(optimizer), steps):
            p.sub_(step)
    optimizer.step()


def decay_by_hand(model, x, optimizer, losses):
    closure_of(model, x, optimizer, losses)()
    optimizer.step()
    with torch.no_grad():
        for p in of_groups(optimizer):
            p.mul_(0.5)
        losses.append(loss_of(model, x).item())


def turns(model, x, optimizer, losses):
    """One is written to, then the other one, with nothing read between."""
    closure_of(model, x, optimizer, losses)()
    optimizer.step()
    with torch.no_grad():
        for p, q in zip(model.parameters(), of_groups(optimizer)):
            p.mul_(0.5)
            q.add_(0.25)
            p.data.mul_(2)
            q.data.sub_(0.125)
            p.fill_(0.5) if p.dim() == 1 else q.mul_(0.5)
        losses.append(loss_of(model, x).item())


def swapped_for_evaluation(model, x, optimizer, losses):
    """As schedule-free optimizers do: other weights while the model is evaluated."""
    closure_of(model, x, optimizer, losses)()
    optimizer.step()
    kept = [p.detach().clone() for p in of_groups(optimizer)]
    with torch.no_grad():
        torch._foreach_mul_(of_groups(optimizer), 0.9)
    with torch.inference_mode():
        losses.append(loss_of(model, x).item())
    with torch.no_grad():
        for p, before in zip(of_groups(optimizer), kept):
            p.copy_(before)


def other_memory(model, x, optimizer, losses):
    closure_of(model, x, optimizer, losses)()
    optimizer.step()
    for p in model.parameters():
        p.data = p.data * 0.5
    losses.append(loss_of(model, x).item())


def converted(model, x, optimizer, losses):
    """By torch, into what it is: `nn.Module.to` gives each parameter the data of a fresh one."""
    closure_of(model, x, optimizer, losses)()
    model.to("cpu").double()
    optimizer.step()
    model.to("cpu")
    with torch.no_grad():
        for p in of_groups(optimizer):
            p.mul_(0.5)
    model._apply(torch.clone)
    losses.append(loss_of(model, x).item())


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PROGRAMS = {"lbfgs": (lbfgs, lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4)),
            "lbfgs with a line search": (lbfgs, lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe")),
            **{one.__name__: (one, SGD) for one in (sam, decay_by_hand, turns, swapped_for_evaluation, other_memory,
                                                        converted)}}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("where", PLACES)
def test_both_read_like_one_tensor(where, program, stage):
    run, optimizer = PROGRAMS[program]
    nets, losses = both(where, optimizer, stage), ([], [])
    for _ in range(3):
        for (model, x, own), its in zip(nets, losses):
            run(model, x, own, its)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-9)
    for p, q in zip(nets[1][0].parameters(), nets[0][0].parameters()):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_ordinary_step_gathers_once(stage):
    (_, _, _), (model, x, optimizer) = both("2", SGD, stage)
    for _ in range(3):
        loss_of(model, x).backward()
        with gt.record() as moves:
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, x)
        assert [move.op for move in moves].count("zero") == 1, moves


def halve_the_last(optimizer, *_):
    of_groups(optimizer)[-1].data.mul_(0.5)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("way", [
    lambda m, flat: nn.utils.vector_to_parameters(flat, m.parameters()),
    lambda m, flat: setattr(m.weight, "data", flat[2:26].view(4, 6)),
    lambda m, flat: setattr(m, "weight", nn.Parameter(flat[2:26].view(4, 6)))], ids=["vector", "data", "parameter"])
def test_parameters_that_are_boxed_views_are_stepped_with_what_they_are_views_of(way, stage):
    def stepped(model, flat, x):
        way(model, flat)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if stage and flat is not plain:
            optimizer = gt.zero(optimizer, "dp", stage)
        for _ in range(2):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*(p.detach() for p in model.parameters()), flat]

    where = place(*PLACES["2 x tp 2"])
    torch.manual_seed(SEED)
    plain, x, model = torch.randn(28).double(), torch.randn(5, 6).double(), nn.Linear(6, 4).double()
    flat = gt.from_full(plain, where, {"tp": S(0)})
    got = stepped(copy.deepcopy(model).to_global(where, B), flat, gt.from_full(x, where, {"dp": S(0)}))
    for one, want in zip(got, stepped(model, plain, x), strict=True):
        torch.testing.assert_close(one.full_tensor(), want)


@pytest.mark.parametrize("stage", [1, 2])
def test_only_what_a_step_changes_is_gathered(stage):
    """Not what is frozen or got no gradient; but what it writes to without one, and what was written to before it."""
    where, optimizer = place([0, 1], ("dp",)), partial(torch.optim.SGD, lr=0.1)
    torch.manual_seed(SEED)
    plain = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in ("frozen", "unused", "used", "by hand")})
    plain.frozen.requires_grad_(False)
    model, data = gt.parallelize(copy.deepcopy(plain), where), torch.randn(6, 64)
    sides = [(plain, data, optimizer(plain.parameters())),
             (model, gt.from_full(data, where, S(0)), gt.zero(optimizer(model.parameters()), stage=stage))]
    for _, _, own in sides:
        own.register_step_pre_hook(halve_the_last)
    for step in range(3):
        for m, x, own in sides:
            own.zero_grad()
            loss_of(lambda x, m=m: m["by hand"](m.used(m.frozen(x))).tanh(), x).backward()
            m["by hand"].weight.grad = None
            if step == 1:
                with torch.no_grad():
                    of_groups(own)[1].add_(1)
            with gt.record() as moves:
                own.step()
        assert [move.op for move in moves] == ["gradient", "zero"], moves
        assert sum(move.bytes for move in moves if move.op == "zero") == 64 * 64 * 4 // 2
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(p.full_tensor(), q.detach(), msg=lambda text, name=name: f"{name}: {text}")


def test_what_is_not_allowed_leaves_both_as_they_were():
    (_, _, _), (model, x, optimizer) = both("2", SGD, 1)
    has_part = bool(model[0].weight.shards)          # else this process has nothing to bring up to date
    with torch.no_grad():
        of_groups(optimizer)[0].zero_()
        with pytest.raises(gt.BoxingError) if has_part else nullcontext(), gt.boxing("forbid"):
            model[0].weight.sum()
    assert model[0].weight.full_tensor().eq(0).all()


def test_weights_of_16_bits_keep_what_their_parts_say_more():
    where = place([0, 1], ("dp",))
    model = gt.parallelize(net().bfloat16(), where)
    optimizer = gt.zero(torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    part, p = of_groups(optimizer)[0], model[0].weight
    with torch.no_grad():
        part.add_(1e-3)
        masters = part.full_tensor().clone()
        assert torch.equal(p.full_tensor(), masters.bfloat16())
        p[0].fill_(2)
    assert torch.equal(part.full_tensor()[1:], masters[1:]) and part.full_tensor()[0].eq(2).all()


def test_an_optimizer_that_is_gone_leaves_a_parameter_alone():
    """And it goes, though the parameters stay."""
    (_, _, _), (model, x, optimizer) = both("2", SGD, 1)
    with torch.no_grad():
        of_groups(optimizer)[0].add_(1)
    del optimizer
    loss_of(model, x).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_mistakes_leave_an_optimizer_as_it_was(tmp_path):
    where = place([0, 1], ("dp",))
    (plain, x, _), (model, spread, _) = both("2", SGD, 3)
    model = gt.parallelize(copy.deepcopy(plain), where)
    other, file = net(), tmp_path / "file"
    file.write_text("")
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": other.parameters()}])
    before = of_groups(optimizer)
    for mistake in ({"stage": 1}, {"stage": 3, "model": net()}, {"offload": file / "in a file"}):
        with pytest.raises((SbpError, OSError)):
            gt.zero(optimizer, **mistake)
        assert all(p is q for p, q in zip(of_groups(optimizer), before))
        assert all(gradients.part_of(p) is None for p in model.parameters())
    gt.parallelize(other, where)
    gt.zero(optimizer)
    with pytest.raises(SbpError, match="called for before"):
        gt.zero(optimizer)
    with pytest.raises(GlobalTensorError, match="cannot be copied"):
        copy.deepcopy((model, optimizer))
    copied = copy.deepcopy(model)
    copied_optimizer = gt.zero(torch.optim.AdamW(copied.parameters()))
    loss_of(copied, spread).backward()
    copied_optimizer.step()
    assert not torch.equal(copied[0].weight.full_tensor(), model[0].weight.full_tensor())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_wrapper_without_hooks_is_refused_before_its_optimizer_is_changed(stage):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

        def step(self, closure=None):
            return self.inner.step(closure)

    (plain, x, other), (model, spread, _) = both("2", SGD, 1)
    model = gt.parallelize(copy.deepcopy(plain), place([0, 1], ("dp",)))
    inner = SGD(model.parameters())
    before = of_groups(inner)
    with pytest.raises(SbpError, match="the one inside, and Wrapper"):
        gt.zero(Wrapper(inner), stage=stage)
    assert all(p is q for p, q in zip(of_groups(inner), before))
    for net, batch, optimizer in ((plain, x, Wrapper(other)), (model, spread, Wrapper(gt.zero(inner, stage=stage)))):
        loss_of(net, batch).backward()
        optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q.detach())


def test_of_two_optimizers_of_one_parameter_the_first_is_done():
    (_, _, _), (model, x, first) = both("2", SGD, 1)
    loss_of(model, x).backward()
    first.step()
    second = gt.zero(SGD(model.parameters()), stage=1)
    loss_of(model, x).backward()
    second.step()
    with pytest.raises(GlobalTensorError, match="another one has taken over"):
        first.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_another_dtype_of_the_model(stage):
    """Parts go on as master weights of what has fewer digits now; of more digits they would lose some."""
    where = place([0, 1], ("dp",))
    plain = net().float()
    model = gt.parallelize(copy.deepcopy(plain), where)
    optimizer = gt.zero(torch.optim.SGD(model.parameters(), 0.1), stage=stage, model=model if stage == 3 else None)
    data, losses = torch.randn(5, 6), ([], [])
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for m, x, o, its in ((plain, data, torch.optim.SGD(plain.parameters(), 0.1), losses[0]),
                             (model, gt.from_full(data, where, S(0)), optimizer, losses[1])):
            m.to(dtype)
            closure_of(m, x.to(dtype), o, its)()
            o.step()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=1e-3)
    loss_of(model.double(), gt.from_full(data.double(), where, S(0))).backward()
    with nullcontext() if stage == 3 else pytest.raises(GlobalTensorError, match="more digits than the part"):
        optimizer.step()


def test_the_state_is_asked_for_by_parameter():
    (_, _, _), (model, x, optimizer) = both("2", SGD, 1)
    loss_of(model, x).backward()
    optimizer.step()
    for _ in range(2):
        assert optimizer.state[model[0].weight]["momentum_buffer"].sbp == (S(0),)
        state = optimizer.state_dict()
        assert len(state["state"]) == 4 and "masters" not in state
        optimizer.load_state_dict(state)


def _momentum_to_zero(state, p):
    if p in state:
        state[p]["momentum_buffer"].zero_()


STATE_IS_RESET = {
    "if p in state": _momentum_to_zero,
    "if p in state.keys()": lambda state, p: _momentum_to_zero(state, p) if p in state.keys() else None,
    "get": lambda state, p: state.get(p, {"momentum_buffer": p})["momentum_buffer"].zero_(),
    "get of none": lambda state, p: state[p].update(state.get(nn.Parameter(p.detach()), {"momentum_buffer": None})),
    "pop": lambda state, p: state.pop(p, None),
    "pop, put back": lambda state, p: state.update({p: {**state.pop(p), "momentum_buffer": None}}),
    "state[p] = {}": lambda state, p: state.__setitem__(p, {}),
    "del state[p]": lambda state, p: state.__delitem__(p),
    "setdefault": lambda state, p: state.setdefault(p, {}).clear(),
    "update": lambda state, p: state.update([(p, {})]),
    "|=": lambda state, p: state.__ior__({p: {}}),
    "copy": lambda state, p: state.copy()[p].clear(),
    "clear": lambda state, p: state.clear(),
    "ones like it": lambda state, p: state.__setitem__(p, {"momentum_buffer": torch.ones_like(p)}),
    "zeros like it": lambda state, p: state[p].update(momentum_buffer=torch.zeros_like(p)),
    "plain zeros": lambda state, p: state[p].update(momentum_buffer=torch.zeros(p.shape, dtype=p.dtype)),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("way", STATE_IS_RESET)
def test_the_state_is_changed_by_parameter(way, stage):
    losses, kept = [], []
    for model, x, optimizer in both("2 x tp 2", SGD, stage):
        losses.append([])
        for _ in range(3):
            closure_of(model, x, optimizer, losses[-1])()
            optimizer.step()
            for p in (model[0].weight, model[2].bias):
                STATE_IS_RESET[way](optimizer.state, p)
        kept.append([p in optimizer.state for p in model.parameters()] + [len(optimizer.state)])
        optimizer.load_state_dict(optimizer.state_dict())
        for _ in range(2):
            closure_of(model, x, optimizer, losses[-1])()
            optimizer.step()
    torch.testing.assert_close(losses[1], losses[0])
    assert kept[1] == kept[0]
    kept = [t for p in optimizer.state for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    assert len(kept) == 4 and all(t.sbp[0].is_split for t in kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_state_of_whole_parameters_is_loaded_split(stage, dtype):
    """That of an optimizer without ZeRO, of a global model or of a plain one."""
    where = place([0, 1], ("dp",))
    plain, x = net().to(dtype), torch.randn(5, 6).to(dtype)
    for is_global in (False, True):
        source = gt.parallelize(copy.deepcopy(plain), where) if is_global else copy.deepcopy(plain)
        before = SGD(source.parameters())
        closure_of(source, gt.from_full(x, where, S(0)) if is_global else x, before, [])()
        before.step()
        model = gt.parallelize(copy.deepcopy(plain), where)
        optimizer = gt.zero(SGD(model.parameters()), stage=stage)
        optimizer.load_state_dict(before.state_dict())
        for p, q in zip(model.parameters(), source.parameters(), strict=True):
            momentum, expected = optimizer.state[p]["momentum_buffer"], before.state[q]["momentum_buffer"]
            assert momentum.sbp[0].is_split and momentum.dtype == of_groups(optimizer)[0].dtype
            expected = expected.full_tensor() if is_global else expected
            torch.testing.assert_close(momentum.full_tensor().to(dtype), expected)


# ranks, the parameters that are split along dp already, and the stage
LAID_OUT = {"of one device": (None, (), 0), "without": ([0, 1], (), 0), "stage 1": ([0, 1], (), 1),
            "first split": ([0, 1], ("0.weight",), 1), "others split": ([0, 1], ("2.weight", "2.bias"), 2),
            "stage 3": ([1, 2, 3], ("0.bias",), 3)}


def of_16_bits(laid_out):
    ranks, split, stage = LAID_OUT[laid_out]
    model = net().bfloat16()
    if ranks:
        gt.to_global(model, place(ranks, ("dp",)), lambda name, p: S(0) if name in split else B)
    optimizer = SGD(model.parameters())
    return model, gt.zero(optimizer, stage=stage) if stage else optimizer


def step_of(model, optimizer, seed):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).bfloat16()
    where = getattr(model[0].weight, "placement", None)
    closure_of(model, x if where is None else gt.from_full(x, where, S(0)), optimizer, [])()
    optimizer.step()


def whole(p):
    return p.detach().full_tensor() if hasattr(p, "sbp") else p.detach()


def masters_of(optimizer):
    """Those that say more than the parameters do, by number."""
    return {k: p.detach().full_tensor() for k, p in enumerate(of_groups(optimizer)) if p.dtype == torch.float32}


@pytest.mark.parametrize("by", ["folder", "folder, of one that has stepped", "file", "state_dict"])
@pytest.mark.parametrize("dst", LAID_OUT)
def test_weights_of_16_bits_go_on_in_another_layout(dst, by, tmp_path):
    """The masters of parameters that have one in both go on bit for bit; where there is none it is the value."""
    folder = Path(broadcast_object(str(tmp_path), 0))            # test_lockstep runs this in several processes
    for nth, src in enumerate(LAID_OUT):
        (model, optimizer), (ours, own) = of_16_bits(src), of_16_bits(dst)
        step_of(model, optimizer, 1)
        if "stepped" in by:
            step_of(ours, own, 2)
        _hand_over({"model": model, "optimizer": optimizer}, {"model": ours, "optimizer": own}, folder / str(nth),
                   by if LAID_OUT[dst][2] or by != "state_dict" else "file")     # else the state stays where it was
        for p, value in zip(ours.parameters(), values := [*map(whole, model.parameters())], strict=True):
            assert torch.equal(whole(p), value), src
        masters = masters_of(optimizer)
        for k, master in masters_of(own).items():
            assert torch.equal(master, masters.get(k, values[k].float())), src
        step_of(model, optimizer, 3)
        step_of(ours, own, 3)
        for p, q in zip(ours.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(whole(p), whole(q), rtol=2e-2, atol=2e-3)


def _hand_over(state, to, path, by):
    if by.startswith("folder"):
        gt.save(state, path)
        gt.load(to, path)
        return
    state = {name: copy.deepcopy(value.state_dict()) for name, value in state.items()}
    if by == "file":
        gt.save(state, path.with_suffix(".pt"))
        state = gt.load(path.with_suffix(".pt"))
    for name, value in to.items():
        value.load_state_dict(state[name])


def test_masters_of_another_model_are_refused():
    _, optimizer = of_16_bits("stage 1")
    before = masters_of(optimizer)
    state = optimizer.state_dict()
    for changed, error, words in (({"masters": {0: torch.zeros(3)}}, GlobalTensorError, "of another model"),
                                  ({"param_groups": []}, ValueError, "parameter groups")):
        with pytest.raises(error, match=words):
            optimizer.load_state_dict({**state, **changed})
    after = masters_of(optimizer)
    assert before.keys() == after.keys() == {0, 1, 2, 3} and all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("stage", [1, 2])
def test_another_dict_as_the_state(stage):
    losses = []
    for model, x, optimizer in both("2", SGD, stage):
        losses.append([])
        for anew in (False, True, False):
            closure_of(model, x, optimizer, losses[-1])()
            if anew:
                held = {p: optimizer.state[p] for p in [*model.parameters()][1:]}
                optimizer.state = defaultdict(dict, held)
            optimizer.step()
        assert len(optimizer.state) == 4 and all(p in optimizer.state for p in model.parameters())
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("where", PLACES)
def test_parameters_that_are_added_later(where, stage, by_layer, tmp_path):
    """As fine-tuning does: the head is trained first, then what comes before it, too."""
    where, plain, x = place(*PLACES[where]), net(), torch.randn(5, 6).double()
    model = gt.parallelize(copy.deepcopy(plain), where, ROWS if "tp" in where.axis_names else {})
    gx = gt.from_full(x, where, {axis: S(0) for axis in where.axis_names if axis == "dp"})
    own = gt.zero(SGD(model[2].parameters()), stage=stage, model=model if by_layer and stage == 3 else None,
                  offload=tmp_path if by_layer else None)
    nets = (plain, x, SGD(plain[2].parameters())), (model, gx, own)
    for steps in (2, 3):
        for its, batch, optimizer in nets:
            its[0].requires_grad_(steps == 3)
            if steps == 3:
                optimizer.add_param_group({"params": its[0].parameters(), "lr": 0.05})
            for _ in range(steps):
                closure_of(its, batch, optimizer, [])()
                optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-6, atol=1e-8)
        assert own.state[p]["momentum_buffer"].sbp[0].is_split
    before = of_groups(own)
    for group, error in ((model[0].parameters(), ValueError), (nn.Linear(2, 2).parameters(), SbpError)):
        with pytest.raises(error):
            own.add_param_group({"params": group})
    assert all(p is q for p, q in zip(of_groups(own), before, strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_that_leave_an_optimizer_are_freed(stage):
    """Heads of tasks that come and go, with gradients; each is away for a step, written to meanwhile, and back."""
    where, plain, x = place([0, 1], ("dp",)), net(), torch.randn(5, 6).double()
    model, gx = gt.parallelize(copy.deepcopy(plain), where), gt.from_full(x, where, S(0))
    nets = (plain, x, SGD(plain.parameters())), (model, gx, gt.zero(SGD(model.parameters()), stage=stage))
    heads = []

    def step_with(its, batch, optimizer, head):
        loss_of(nn.Sequential(its, head), batch).backward()
        optimizer.step()
        its.zero_grad()
        for p in optimizer.param_groups[-1]["params"]:
            optimizer.state.pop(p, None)
        return optimizer.param_groups.pop()

    for nth in range(3):
        torch.manual_seed(nth)
        own = nn.Linear(4, 3).double()
        for its, batch, optimizer in nets:
            head = copy.deepcopy(own) if its is plain else gt.parallelize(copy.deepcopy(own), where)
            optimizer.add_param_group({"params": head.parameters()})
            group = step_with(its, batch, optimizer, head)
            closure_of(its, batch, optimizer, [])()              # without the head, which is away
            optimizer.step()
            with torch.no_grad():
                head.weight.mul_(0.5)
            optimizer.param_groups.append(group)
            step_with(its, batch, optimizer, head)
            optimizer.add_param_group({"params": head.parameters()})         # anew
            step_with(its, batch, optimizer, head)
            heads.append(head.weight.detach().full_tensor() if its is model else head.weight.detach())
            if its is model:
                gone = weakref.ref(head.weight)
            del head, group
        torch.testing.assert_close(*heads[-2:])
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-6, atol=1e-8)
    gc.collect()
    assert gone() is None
