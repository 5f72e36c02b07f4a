"""What could end the interpreter, each case in a process of its own: forked, so that they start at once.

Prints a line of JSON: case -> "" where it ran to its end, else what it raised or how it died. A case that must be
refused raises GlobalTensorError with a reason and something to type; its name begins with "refused: ".
"""
from __future__ import annotations

import copy
import json
import os
import signal

import torch

import globaltensor as gt
from globaltensor.errors import GlobalTensorError

P, Q = gt.placement("cpu", [0, 1]), gt.placement("cpu", [0, 1, 2])
S, B = gt.sbp.split, gt.sbp.broadcast
LAYOUTS = {"S": S(0), "B": B, "P": gt.sbp.partial_sum}


def numbers(sbp):
    return gt.arange(5.0, placement=P, sbp=sbp)


def same(x, plain):
    assert torch.equal(x.full_tensor(), plain), (x, plain)
    assert torch.equal((x + 1).full_tensor(), plain + 1)


# ------------------------------------------------------------------------------------------------- x.data = y

def its_own(sbp):
    """Nothing changes, however often; nothing is freed."""
    x = numbers(sbp)
    for _ in range(20):
        x.data = x
    same(x, torch.arange(5.0))
    y = x.detach()
    y.data = y
    x.data = x.data
    same(y, torch.arange(5.0))


def trained(sbp):
    """Views, versions and gradients as in plain torch."""
    x, plain = numbers(sbp).requires_grad_(), torch.arange(5.0).requires_grad_()
    for t in (x, plain):
        square = (t * t).sum()
        t.data = t
        square.backward()
        t.grad.data = t.grad
    same(x.grad, plain.grad)
    assert x.is_leaf and x.requires_grad and x._version == plain._version


def another(sbp):
    """Another layout, another placement, shape and dtype; what was made before keeps the old value."""
    x, y = numbers(sbp), gt.ones(3, 4, dtype=torch.float64, placement=Q, sbp=S(1))
    before = x.detach()
    x.data = y
    assert (x.shape, x.dtype, x.placement, x.sbp) == (y.shape, y.dtype, Q, y.sbp)
    assert x.untyped_storage().nbytes() == 96
    same(x, torch.ones(3, 4, dtype=torch.float64))
    same(before, torch.arange(5.0))
    x.data = numbers(S(0)).to_global(sbp=sbp)
    same(x, torch.arange(5.0))


def module(sbp):
    """Conversions of modules, those that change nothing too; the parameters stay the objects they are."""
    plain = torch.nn.Linear(4, 3)
    m = copy.deepcopy(plain).to_global(P, B if sbp.is_partial else sbp)
    known = list(m.parameters())
    for change in (lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.double(), lambda m: m.requires_grad_(),
                   lambda m: m.float(), lambda m: m.cpu(), lambda m: m.type(torch.float32)):
        change(m), change(plain)
        assert all(a is b for a, b in zip(m.parameters(), known))
        m(torch.ones(2, 4, dtype=m.weight.dtype)).sum().backward()
        plain(torch.ones(2, 4, dtype=plain.weight.dtype)).sum().backward()
    assert torch.equal(m.weight.full_tensor(), plain.weight) and m.weight.grad.dtype == torch.float32
    assert torch.allclose(m.weight.grad.full_tensor(), plain.weight.grad)


def module_made_global(sbp):
    """A module whose plain parameters become global on the way takes new ones."""
    m = torch.nn.Linear(4, 3)
    m._apply(lambda t: gt.from_full(t, P, sbp))
    assert m.weight.is_global and m(torch.ones(2, 4)).shape == (2, 3)
    m._apply(lambda t: t.full_tensor())
    assert not m.weight.is_global and m(torch.ones(2, 4)).shape == (2, 3)


def swapped(sbp):
    x, y = numbers(sbp), gt.ones(3, 4, placement=Q, sbp=S(1))
    torch.utils.swap_tensors(x, y)
    same(x, torch.ones(3, 4))
    same(y, torch.arange(5.0))


def plain_data(sbp):
    numbers(sbp).data = torch.ones(5)


def meta_data(sbp):
    numbers(sbp).data = torch.ones(5, device="meta")


def data_of_plain(sbp):
    plain = torch.ones(5)
    try:
        plain.data = numbers(sbp)
    except RuntimeError as error:                    # torch's own
        assert "incompatible tensor type" in str(error)
    assert torch.equal(plain, torch.ones(5))


CASES = {f"{'refused: ' if case in (plain_data, meta_data) else ''}{case.__name__}, {name}": (case, (sbp,))
         for case in (its_own, trained, another, module, module_made_global, swapped, plain_data, meta_data,
                      data_of_plain)
         for name, sbp in LAYOUTS.items()}


def outcome(case, args, refused):
    try:
        case(*args)
    except GlobalTensorError as error:
        if refused and error.why and error.fix and "no_memory.py" in error.where:
            return ""
        return str(error)
    except BaseException as error:
        return repr(error)
    return "it was not refused" if refused else ""


def alone(case, args, refused):
    """Its outcome in a process of its own."""
    end, start = os.pipe()
    child = os.fork()
    if not child:
        os.write(start, outcome(case, args, refused)[:60_000].encode())
        os._exit(0)
    os.close(start)
    with open(end, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    return said if not status else f"died of {signal.Signals(status & 0x7F).name}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for some in LAYOUTS.values():                    # what is loaded at first use is loaded once
        same(numbers(some), torch.arange(5.0))
    print(json.dumps({name: alone(case, args, name.startswith("refused")) for name, (case, args) in CASES.items()}))
