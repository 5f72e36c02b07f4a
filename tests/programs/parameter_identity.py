"""A module that becomes global, or is laid out anew, keeps its parameters: the same objects, hooks and gradients.

Oracle: plain torch, where conversions (`module.double()`) keep the objects. Prints the name of each check that passed.
"""
from __future__ import annotations

import copy
import gc
import itertools
import pickle
import sys
import weakref

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import globaltensor as gt
from globaltensor.errors import GlobalTensorError

SEED = 20_261_122
print(f"parameter_identity.py: SEED={SEED}", file=sys.stderr)
S, B = gt.sbp.split, gt.sbp.broadcast
LINE = gt.placement("cpu", [0, 1, 2])
GRID = gt.placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))


class Tied(nn.Module):
    """token and head share a matrix; `frozen` is not part of training; a buffer."""

    def __init__(self):
        super().__init__()
        self.token, self.up, self.down = nn.Embedding(6, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.token.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, ids):
        x = self.token(ids) * self.scale + self.frozen
        return self.head(x + self.down(torch.tanh(self.up(x))))


CONVERSIONS = {
    "to_global": lambda m: m.to_global(LINE, B),
    "to_global by name": lambda m: gt.to_global(m, LINE, {"*weight": S(0), "frozen": S(0)}),
    "parallelize": lambda m: gt.parallelize(m, GRID),
    "twice": lambda m: m.to_global(LINE, S(0)).to_global(GRID, B),
    "another sbp": lambda m: m.to_global(LINE, S(0)).to_global(LINE, B),
}
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True),
    "adamw, one by one": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
}


def model():
    torch.manual_seed(SEED)
    return Tied()


def whole(t):
    return t.detach().full_tensor() if t.is_global else t.detach()


def alike(got, want):
    for (name, g), (_, w) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        torch.testing.assert_close(whole(g), whole(w), msg=lambda text, name=name: f"{name}: {text}")


def loss_of(m, step):
    ids = torch.randint(6, (3, 5), generator=torch.Generator().manual_seed(step))
    where = m.token.weight.placement if m.token.weight.is_global else None
    return m(ids if where is None else gt.from_full(ids, where, B)).square().mean()


def train(m, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(m, step).backward()
        optimizer.step()
    return m


def optimizers_made_before_and_after():
    for make in OPTIMIZERS.values():
        plain = model()
        train(plain, make(plain.parameters()))
        for convert in CONVERSIONS.values():
            for before in (True, False):
                m = model()
                old = dict(m.named_parameters())
                optimizer = make(m.parameters()) if before else None
                convert(m)
                assert all(p is old[name] and p.is_global for name, p in m.named_parameters())
                alike(train(m, optimizer or make(m.parameters())), plain)


def parameters_are_what_they_were():
    for convert in CONVERSIONS.values():
        m = model()
        m.up.weight.tag = "up"
        convert(m)
        assert m.head.weight is m.token.weight and m.up.weight.tag == "up" and m.scale.is_global
        assert all(isinstance(p, nn.Parameter) and isinstance(p, gt.GlobalTensor) for p in m.parameters())
        assert not m.frozen.requires_grad and m.up.weight.requires_grad and m.up.weight.is_leaf
        alike(m, model())


def gradients_stay():
    for convert in CONVERSIONS.values():
        plain, m = model(), model()
        for one in (plain, m):
            loss_of(one, 0).backward()
        convert(m)
        for p, q in zip(m.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                assert p.grad.placement == p.placement
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        for one in (plain, m):
            loss_of(one, 1).backward()               # added to what was there
        for p, q in zip(m.parameters(), plain.parameters(), strict=True):
            assert q.grad is None or p.grad.sbp == p.sbp
            assert q.grad is None or torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-5)


TORCHS = {"to": lambda m: m.to("cpu"), "float": lambda m: m.float(), "another dtype": lambda m: m.double().float(),
          "_apply": lambda m: m._apply(torch.clone)}


def hooks_stay():
    def hooked(convert, first=lambda m: m):
        m, calls = first(model()), []
        p = m.up.weight
        handles = [p.register_hook(lambda grad: grad * 2),
                   p.register_post_accumulate_grad_hook(lambda q: calls.append(whole(q.grad).clone()))]
        if convert is not None:
            convert(m)
        loss_of(m, 0).backward()
        grads = [whole(p.grad).clone()]
        late = p.register_post_accumulate_grad_hook(lambda q: calls.append(whole(q.grad).clone() + 1))
        loss_of(m, 1).backward()
        for handle in (*handles, late):
            handle.remove()
        loss_of(m, 2).backward()
        return [*grads, *calls, whole(p.grad)]

    want = hooked(None)
    assert len(want) == 5
    for got in (*map(hooked, CONVERSIONS.values()),
                *(hooked(own, CONVERSIONS["parallelize"]) for own in TORCHS.values())):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


def torchs_own_conversions_keep_what_is_noted():
    """What users set on a parameter, the dtype of its reduction, and that it is watched when it learns again."""
    for convert in TORCHS.values():
        m = gt.parallelize(nn.Linear(32, 32), gt.placement("cpu", [0, 1]))
        gt.set_grad_reduce_dtype(m.parameters(), torch.bfloat16)
        m.weight.mark = 5
        m.bias.requires_grad_(False)
        convert(m)
        m.bias.requires_grad_(True)
        with gt.record() as moves:
            m(gt.ones(2, 32, placement=m.weight.placement, sbp=S(0))).sum().backward()
            assert m.weight.grad.sbp == m.bias.grad.sbp == (B,)
        assert m.weight.mark == 5 and sum(move.bytes for move in moves) == 2 * m.weight.numel()


def an_optimizer_in_a_hook():
    """The step is part of the backward pass: the gradient that the hook reads is reduced."""
    def trained(convert):
        m = model()
        for p in m.parameters():
            if p.requires_grad:
                optimizer = torch.optim.SGD([p], lr=0.05)

                def step_and_forget(_, optimizer=optimizer):
                    optimizer.step()
                    optimizer.zero_grad()

                p.register_post_accumulate_grad_hook(step_and_forget)
        if convert is not None:
            convert(m)
        for step in range(3):
            loss_of(m, step).backward()
        return m

    plain = trained(None)
    for convert in CONVERSIONS.values():
        alike(trained(convert), plain)


def zero_keeps_them():
    plain = model()
    train(plain, OPTIMIZERS["adam"](plain.parameters()))
    for stage in (1, 2, 3):
        m = model()
        old = dict(m.named_parameters())
        optimizer = OPTIMIZERS["adam"](m.parameters())
        gt.parallelize(m, GRID)
        gt.zero(optimizer, stage=stage)
        alike(train(m, optimizer), plain)
        assert all(p is old[name] for name, p in m.named_parameters())


def a_pipeline_keeps_them():
    torch.manual_seed(SEED)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    plain = copy.deepcopy(layers)
    optimizers = [torch.optim.SGD([p for layer in ls for p in layer.parameters()], lr=0.1) for ls in (plain, layers)]
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    pipe = gt.pipeline(layers, [gt.placement("cpu", [0]), gt.placement("cpu", [1])], "1f1b", 2, nn.functional.mse_loss)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(plain[1](plain[0](x)), y).backward()
        pipe.step(x, y)
        for optimizer in optimizers:
            optimizer.step()
    for g, w in zip(layers, plain):
        alike(g, w)


def copies_are_as_torch_makes_them():
    def facts(p):
        both = copy.deepcopy([p, p])
        rows = [both[0] is both[1]]
        for other in (both[0], pickle.loads(pickle.dumps(p))):
            torch.testing.assert_close(whole(other), whole(p), rtol=0, atol=0)
            assert other.is_global == p.is_global
            rows.append((isinstance(other, nn.Parameter), other.requires_grad, other.is_leaf,
                         None if other.grad is None else whole(other.grad).tolist(), getattr(other, "tag", None)))
        return rows

    for needs_grad in (True, False):
        for parameter in (True, False):
            t = torch.arange(6.0)
            sides = (t, gt.from_full(t, LINE, S(0)))
            sides = [nn.Parameter(one, needs_grad) if parameter else one.requires_grad_(needs_grad) for one in sides]
            for one in sides:
                one.tag = ["mine"]
                if needs_grad:
                    (one * one).sum().backward()
            assert facts(sides[0]) == facts(sides[1]), (facts(sides[0]), facts(sides[1]))


def data_of_another_layout():
    """After `p.data = ...` a gradient that lies as p did before is brought to lie as p does."""
    p = nn.Parameter(gt.from_full(torch.ones(6), LINE, S(0)))
    (p * 2).sum().backward()
    p.data = p.detach().to_global(sbp=B)
    p.grad = None
    y = p.to_global(sbp=S(0)) * torch.arange(6.0).to_global(LINE, B)
    y.sum().backward()
    assert p.grad.sbp == (B,) and p.grad.full_tensor().tolist() == [0, 1, 2, 3, 4, 5]


def torchs_own_conversions():
    """`module.double()` and back, by `.data` and by swap_tensors, between steps."""
    for by_swap in (False, True):
        torch.__future__.set_swap_module_params_on_conversion(by_swap)
        try:
            plain, m = model(), model().to_global(LINE, S(0))
            for one in (plain, m):
                optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
                train(one, optimizer, 1)
                one.double()
                train(one, optimizer, 2)
                one.float()
                train(one, optimizer, 1)
            alike(m, plain)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


def refusals():
    def refused(prepare, convert, why):
        m = model()
        kept = prepare(m)
        before = {name: (p.is_global, whole(p).clone()) for name, p in m.named_parameters()}
        try:
            convert(m)
        except GlobalTensorError as error:
            assert why in error.why and error.fix and "parameter_identity.py" in error.where, error
        else:
            raise AssertionError(f"not refused: {why}")
        assert all(p.is_global == before[name][0] for name, p in m.named_parameters())
        return kept

    refused(lambda m: loss_of(m, 0), CONVERSIONS["to_global"], "backward")
    refused(lambda m: weakref.ref(m.up.weight), CONVERSIONS["to_global"], "weak reference")
    refused(lambda m: gt.zero(torch.optim.Adam(gt.parallelize(m, GRID).parameters())), CONVERSIONS["to_global"], "zero")


def a_loss_that_is_done_is_no_hindrance():
    plain, m = model(), model()
    losses = [loss_of(one, 0) for one in (plain, m)]
    for loss in losses:
        loss.backward()
    m.to_global(LINE, S(0))
    for one in (plain, m):
        train(one, torch.optim.SGD(one.parameters(), lr=0.1))
    alike(m, plain)
    assert losses[0].item() == losses[1].item()


def rnns_look_their_weights_up_anew():
    """torch's RNNs keep weak references to them."""
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        rnn, x = kind(4, 3, 2, bidirectional=True), torch.randn(5, 6, 4)
        plain = copy.deepcopy(rnn)
        steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (rnn, plain)]
        rnn.to_global(LINE, B)
        for _ in range(3):
            for m, optimizer, batch in ((rnn, steps[0], gt.from_full(x, LINE, S(1))), (plain, steps[1], x)):
                optimizer.zero_grad()
                m(batch)[0].pow(2).sum().backward()
                optimizer.step()
        alike(rnn, plain)
        rnn.double()(gt.from_full(x.double(), LINE, S(1)))


class Square(nn.Module):
    """A parametrization that saves what it takes."""

    def forward(self, w):
        return w * w


CHANGES = {
    "remove_parametrizations": lambda m: parametrize.remove_parametrizations(m[0], "weight"),
    "double, and back": lambda m: m.double().float(),
}


def parameters_change_while_an_output_is_held():
    """As in plain torch, which refuses the backward pass of an output from before, if the parameter learns."""
    def squared(layer):
        parametrize.register_parametrization(layer, "weight", Square())

    def parametrized(parametrization, learns):
        torch.manual_seed(SEED)
        m = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        parametrization(m[0])
        m[0].parametrizations.weight.original.requires_grad_(learns)
        return m

    for parametrization in (squared, parametrizations.spectral_norm):
        for change, learns in itertools.product(CHANGES, (True, False)):
            plain, m = (parametrized(parametrization, learns) for _ in range(2))     # a copy would share its class
            m, x = m.to_global(LINE, B), torch.randn(6, 4)
            for one, batch in ((m, gt.from_full(x, LINE, S(0))), (plain, x)):
                held, same = one(batch), one[0].parametrizations.weight.original
                before = held.detach().clone()
                optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
                CHANGES[change](one)
                if change == "remove_parametrizations":
                    assert one[0].weight is same
                    try:
                        held.sum().backward()
                    except RuntimeError:
                        assert learns
                    else:
                        assert not learns
                optimizer.zero_grad()
                one(batch).sum().backward()
                optimizer.step()
                assert (held.detach() - before).abs().sum().item() == 0
            alike(m, plain)


def many_times():
    """Nothing is freed twice or kept."""
    for _ in range(20):
        m = model().to_global(LINE, S(0))
        loss_of(m, 0).backward()
        m.to_global(GRID, B)
        p = weakref.ref(m.up.weight)
        del m
        gc.collect()
        assert p() is None


for check in (optimizers_made_before_and_after, parameters_are_what_they_were, gradients_stay, hooks_stay,
              torchs_own_conversions_keep_what_is_noted, an_optimizer_in_a_hook, zero_keeps_them, a_pipeline_keeps_them,
              copies_are_as_torch_makes_them, data_of_another_layout, torchs_own_conversions, refusals,
              a_loss_that_is_done_is_no_hindrance, rnns_look_their_weights_up_anew,
              parameters_change_while_an_output_is_held, many_times):
    if sys.argv[1:] in ([], [check.__name__]):
        check()
        print(check.__name__, flush=True)
