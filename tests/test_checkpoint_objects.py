"""Modules, optimizers and other objects take what was saved as their own load_state_dict does, modules in place and
without a call where that is all there is to it; plain torch is the oracle."""
from __future__ import annotations

import pytest
import torch
from shards import B, gather, place
from torch import nn

import globaltensor as gt
from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.layouts.sbp import split as S


def whole(t):
    return gather(t.detach()) if t.is_global else t.detach()


class CountedLinear(nn.Linear):
    """Its extra state is a tensor, as that of Transformer Engine's modules."""

    n = 0

    def get_extra_state(self):
        return torch.full((self.n,), self.n)

    def set_extra_state(self, state):
        self.n = len(state)


class PackedLinear(nn.Linear):
    """Has a layout of its own in files, as torch.ao's quantised modules have."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}packed"] = torch.cat([self.weight.detach().flatten(), self.bias.detach()])

    def _load_from_state_dict(self, state_dict, prefix, *others):
        with torch.no_grad():
            packed = state_dict[f"{prefix}packed"]
            self.weight.copy_(packed[:6].view(3, 2))
            self.bias.copy_(packed[6:])


class HalfLinear(nn.Linear):
    def state_dict(self, *args, **options):
        return {name: value.half() for name, value in super().state_dict(*args, **options).items()}


class DoublingLinear(nn.Linear):
    """Doubles what it loads."""

    def _load_from_state_dict(self, state_dict, prefix, *others):
        super()._load_from_state_dict({k: v * 2 for k, v in state_dict.items()}, prefix, *others)


def cloning():
    def clone_all(module, state, prefix, metadata):
        for name in list(state):
            state[name] = state[name].clone()

    model = nn.Linear(2, 3)
    model.register_state_dict_post_hook(clone_all)
    return model


def caching():
    """Computes what it keeps anew when it has been loaded."""
    model = nn.Linear(2, 3)
    model.total = 0.0
    model.register_load_state_dict_post_hook(lambda module, _: setattr(
        module, "total", float(whole(module.weight).sum())))
    return model


def halving():
    """Takes half of what is in a state, before it is loaded."""
    def halve(module, state, prefix, *others):
        for name in state:
            state[name] = state[name] / 2

    model = nn.Linear(2, 3)
    model.register_load_state_dict_pre_hook(halve)
    return model


KINDS = {
    "extra state": lambda: CountedLinear(2, 3), "packed": lambda: PackedLinear(2, 3), "half": lambda: HalfLinear(2, 3),
    "doubling": lambda: DoublingLinear(2, 3), "cloning": cloning, "caching": caching, "halving": halving,
    "inside": lambda: nn.Sequential(nn.BatchNorm1d(2), PackedLinear(2, 3), CountedLinear(3, 3), nn.LayerNorm(3)),
    "stock": lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3), nn.utils.parametrizations.weight_norm(
        nn.Linear(3, 3))),
}
LAYOUTS = {"plain": None, "B": B, "S(0)": lambda name, p: S(0) if p.dim() else B}


def three_of(kind, sbp):
    """Different ones, the first with an extra state."""
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = KINDS[kind]()
        models.append(model if sbp is None else gt.to_global(model, place([0, 1]), sbp))
    for part in models[0].modules():
        if isinstance(part, CountedLinear):
            part.n = 7
    return models


def all_of(model):
    tensors = {name: whole(t).tolist() for name, t in (*model.named_parameters(), *model.named_buffers())}
    return tensors, [(m.n if isinstance(m, CountedLinear) else 0, getattr(m, "total", 0)) for m in model.modules()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["load", "safetensors"])
def test_a_module_takes_what_its_load_state_dict_would(kind, layout, how, tmp_path):
    saved, loaded, right = three_of(kind, LAYOUTS[layout])
    right.load_state_dict(saved.state_dict())
    tensors = [*loaded.parameters(), *loaded.buffers()]
    if how == "safetensors":
        gt.save_safetensors(saved, tmp_path)
        if kind in ("extra state", "inside"):        # its own may have any size, which is checked there
            return
        gt.load_safetensors(loaded, tmp_path)
    else:
        gt.save({"m": saved, "step": 3}, tmp_path)
        gt.load({"m": loaded, "step": 0}, tmp_path)
    assert all_of(loaded) == all_of(right)
    assert all(a is b for a, b in zip(tensors, [*loaded.parameters(), *loaded.buffers()]))


def test_nothing_is_called_where_tensors_are_all_of_it(tmp_path, monkeypatch):
    saved, loaded = (gt.to_global(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)), place([0, 1]), B) for _ in "ab")
    gt.save({"m": saved}, tmp_path)
    calls = []

    def noted(module, state):
        calls.append(module)

    noted.__module__ = nn.Module.__module__
    monkeypatch.setattr(nn.Module, "load_state_dict", noted)
    gt.load({"m": loaded}, tmp_path)
    assert not calls and all_of(loaded) == all_of(saved)


def test_a_module_that_refuses_leaves_the_rest_loaded(tmp_path):
    class Refusing(nn.Linear):
        def get_extra_state(self):
            return {"version": 1}

        def set_extra_state(self, state):
            raise ValueError("a bad mood")

    saved, loaded = Refusing(2, 3), Refusing(2, 3)
    gt.save({"m": saved}, tmp_path)
    with pytest.raises(CheckpointError, match="a bad mood"):
        gt.load({"m": loaded}, tmp_path)


# -------------------------------------------------------------------------------------------- without memory at first


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.tied = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)
        self.tied.weight = self.linear.weight
        self.register_buffer("scale", torch.tensor([3.0, 4.0]))
        self.register_buffer("ramp", torch.arange(3.0), persistent=False)

    def reset_parameters(self):
        self.scale.zero_()
        self.ramp.copy_(torch.arange(3.0))

    def forward(self, x):
        return self.norm(self.linear(x)) * self.scale


@pytest.mark.parametrize("how", [gt.load, gt.resume])
@pytest.mark.parametrize("state", [
    lambda model: {"m": model}, lambda model: model, lambda model: {"norm": model.norm, "m": model},
    lambda model: {"m": model, "norm": model.norm}], ids=["one", "alone", "part first", "part last"])
def test_a_model_without_memory_is_loaded_with_its_buffers(how, state, tmp_path):
    torch.manual_seed(0)
    trained = gt.to_global(Normed(), place([0, 1]), B)
    for _ in range(3):
        trained(torch.randn(4, 2) + 5)
    gt.save(state(trained), tmp_path)
    with torch.device("meta"):
        model = Normed()
    gt.parallelize(model, place([0, 1, 2]))
    how(state(model), tmp_path)
    assert all_of(model) == all_of(trained)
    assert model.tied.weight is model.linear.weight


def test_what_a_state_dict_makes_has_no_memory_to_be_told(tmp_path):
    gt.save({"m": PackedLinear(2, 3)}, tmp_path)
    with torch.device("meta"):
        model = PackedLinear(2, 3)
    gt.parallelize(model, place([0, 1]))
    with pytest.raises(CheckpointError, match=r"'m/packed' of the state is on the meta device(.|\n)*gt.materialize"):
        gt.load({"m": model}, tmp_path)


# ------------------------------------------------------------------------------------- optimizers and other objects


class Shampooing(torch.optim.Optimizer):
    """Keeps a matrix for each dim of a parameter, and momentum if it is told to."""

    def __init__(self, params, lr=0.1, momentum=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, g = self.state[p], p.grad.reshape(len(p), -1)
                if not state:
                    state["GG"] = [torch.zeros_like(g @ g.T), torch.zeros_like(g.T @ g)]
                    if group["momentum"]:
                        state["sum"] = torch.zeros_like(p)
                for total, part in zip(state["GG"], (g @ g.T, g.T @ g)):
                    total.add_(part)
                step = state["GG"][0] @ g @ state["GG"][1]
                if group["momentum"]:
                    step = state["sum"].mul_(group["momentum"]).add_(step.view_as(p)).view_as(step)
                p.add_(step.view_as(p), alpha=-group["lr"] * 1e-3)


OPTIMIZERS = {
    "LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=3),
    "Shampoo": Shampooing,
    "Shampoo with momentum": lambda params: Shampooing(params, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "lr in a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
}


def trained_by(make, sbp, steps):
    """A model and its optimizer; the losses of these steps."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2), nn.Linear(2, 3))
    model = model if sbp is None else gt.to_global(model, place([0, 1]), sbp)
    optimizer = make(model.parameters())
    return model, optimizer, steps_of(model, optimizer, steps)


def steps_of(model, optimizer, steps):
    torch.manual_seed(2)
    x, losses = torch.randn(4, 3), []

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return losses


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("src, dst", [("plain", "S(0)"), ("S(0)", "plain"), ("B", "B")])
def test_a_fresh_optimizer_takes_states_of_sizes_of_its_own(kind, src, dst, tmp_path):
    model, optimizer, _ = trained_by(OPTIMIZERS[kind], LAYOUTS[src], 3)
    gt.save({"m": model, "o": optimizer}, tmp_path)
    _, _, losses = trained_by(OPTIMIZERS[kind], None, 6)
    model, optimizer, _ = trained_by(OPTIMIZERS[kind], LAYOUTS[dst], 0)
    gt.load({"m": model, "o": optimizer}, tmp_path)
    torch.testing.assert_close(steps_of(model, optimizer, 3), losses[len(losses) // 2:], rtol=1e-3, atol=1e-4)


def test_a_learning_rate_may_become_a_tensor_and_a_number_again(tmp_path):
    for src, dst in ((torch.tensor(0.5), 0.25), (0.5, torch.tensor(0.25))):
        first, second = (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr) for lr in (src, dst))
        gt.save({"o": first}, tmp_path)
        gt.load({"o": second}, tmp_path)
        assert type(second.param_groups[0]["lr"]) is type(src) and float(second.param_groups[0]["lr"]) == 0.5


def several_rates(optimizer):
    rates = torch.optim.lr_scheduler
    parts = [rates.LinearLR(optimizer, 0.1, total_iters=2), rates.ExponentialLR(optimizer, 0.9)]
    return {"SequentialLR": lambda: rates.SequentialLR(optimizer, parts, [2]),
            "ChainedScheduler": lambda: rates.ChainedScheduler(parts, optimizer),
            "LambdaLR": lambda: rates.LambdaLR(optimizer, [lambda n: 0.5 ** n, lambda n: 0.25 ** n]),
            "CosineAnnealingLR": lambda: rates.CosineAnnealingLR(optimizer, 5)}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", ["SequentialLR", "ChainedScheduler", "LambdaLR", "CosineAnnealingLR"])
def test_the_state_dict_of_a_scheduler_is_loaded_as_torch_does(name, tensor, tmp_path):
    """Also where rates are one tensor in a fresh scheduler, and several in one that has gone on."""
    def scheduled(steps):
        model = gt.parallelize(nn.Linear(4, 4), place([0, 1]))
        optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()],
                                    lr=torch.tensor(0.5) if tensor else 0.5)
        scheduler = several_rates(optimizer)[name]()
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return scheduler

    first, ours, theirs = scheduled(3), scheduled(0), scheduled(0)
    gt.save({"s": first.state_dict()}, tmp_path / "s")
    torch.save(first.state_dict(), tmp_path / "s.pt")
    ours.load_state_dict(gt.load({"s": ours.state_dict()}, tmp_path / "s")["s"])
    theirs.load_state_dict(torch.load(tmp_path / "s.pt", weights_only=False))
    assert_same_values(ours.state_dict(), theirs.state_dict())
    assert ours.get_last_lr() == theirs.get_last_lr() == first.get_last_lr()


def assert_same_values(a, b):
    torch.testing.assert_close(*(torch.utils._pytree.tree_leaves(v) for v in (a, b)), rtol=0, atol=0)


def test_plain_values_that_were_one_tensor_and_are_two_are_both_returned(tmp_path):
    one = torch.zeros(2)
    gt.save({"a": torch.ones(2), "b": [torch.ones(2) * 2], "c": (torch.ones(2),), "model": nn.Linear(2, 1)}, tmp_path)
    state = {"a": one, "b": [one], "c": (one,), "model": nn.Linear(2, 1)}
    loaded = gt.load(state, tmp_path)
    assert loaded["a"] is one is loaded["c"][0] and one.tolist() == [1, 1] and loaded["b"][0].tolist() == [2, 2]
    tied = nn.Linear(2, 1)
    gt.save({"model": nn.Linear(2, 1), "w": torch.ones(1, 2)}, tmp_path)
    with pytest.raises(CheckpointError, match="are one tensor in the state, two in the checkpoint"):
        gt.load({"model": tied, "w": tied.weight}, tmp_path)


@pytest.mark.parametrize("make, shape", [(torch.optim.AdamW, (4, 6)), (torch.optim.AdamW, (6, 5)),
                                         (Shampooing, (4, 6))])
def test_the_state_of_other_parameters_is_refused(make, shape, tmp_path):
    first, second = nn.Linear(6, 5, bias=False), nn.ParameterList([torch.ones(shape)])
    optimizer = make(first.parameters())
    first(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    gt.save({"o": optimizer}, tmp_path)
    with pytest.raises(CheckpointError, match="its parameter"):
        gt.load({"o": make(second.parameters())}, tmp_path)


class Averages:
    """Averages of weights, none before the first update."""

    def __init__(self, model=None):
        self.shadow = {} if model is None else {n: p.detach().clone() for n, p in model.named_parameters()}

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = dict(state["shadow"])


def test_an_object_takes_tensors_that_it_does_not_have_yet(tmp_path):
    model = nn.Linear(3, 2)
    gt.save({"e": Averages(model), "none": Averages()}, tmp_path / "plain")
    first, second = Averages(), Averages(nn.Linear(5, 5))
    gt.load({"e": first, "none": second}, tmp_path / "plain")
    assert {n: t.tolist() for n, t in first.shadow.items()} == {n: t.tolist() for n, t in model.named_parameters()}
    assert second.shadow == {}
    spread = gt.to_global(model, place([0, 1]), B)
    gt.save({"e": Averages(spread)}, tmp_path / "global")
    with pytest.raises(CheckpointError, match="how it is to be laid out is not known"):
        gt.load({"e": Averages()}, tmp_path / "global")
    other = Averages(gt.to_global(nn.Linear(5, 5), place([0, 1, 2]), LAYOUTS["S(0)"]))
    gt.load({"e": other}, tmp_path / "global")
    assert {n: whole(t).tolist() for n, t in other.shadow.items()} == {
        n: whole(t).tolist() for n, t in spread.named_parameters()}
