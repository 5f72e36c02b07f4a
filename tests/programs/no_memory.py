"""What could end the interpreter, in child processes (tests/children.py).

Prints a line of JSON: case -> "" where it ran to its end, else what it raised or how it died. A case that must be
refused raises GlobalTensorError with a reason and something to type; its name begins with "refused: ".
"""
from __future__ import annotations

import copy
import io
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from children import outcomes

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


# --------------------------------------------------------------------------- plain tensors without memory, by door

class Wrapper(torch.Tensor):
    """A tensor that stands for another one, as torch has many."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(*[t.inner if isinstance(t, cls) else t for t in args], **(kwargs or {})))


def freed():
    t = torch.ones(5)
    t.untyped_storage().resize_(0)
    return t


def part_of_freed():
    t = torch.ones(6)[1:]
    t.untyped_storage().resize_(0)
    return t


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(5)


@cache
def dtensor():
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    return distribute_tensor(torch.ones(5), DeviceMesh("cpu", [0]), [Replicate()])


def quantized():
    return torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.qint8)


KINDS = {
    "meta": lambda: torch.ones(5, device="meta"), "part of meta": lambda: torch.ones(6, device="meta")[1:],
    "freed": freed, "part of freed": part_of_freed, "fake": fake, "wrapper": lambda: Wrapper(torch.ones(5)),
    "dtensor": dtensor, "sparse": lambda: torch.ones(5).to_sparse(), "csr": lambda: torch.ones(5, 1).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(5).to_mkldnn(), "quantized": quantized,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}
DOORS = {
    "x + t": lambda x, t: x + t, "x.copy_": lambda x, t: x.copy_(t), "x.add_": lambda x, t: x.add_(t),
    "cat": lambda x, t: torch.cat([x, x, t]), "where": lambda x, t: torch.where(x > 1, x, t),
    "foreach": lambda x, t: torch._foreach_add([x], [t]), "einsum": lambda x, t: torch.einsum("i,j->ij", x, t),
    "linear": lambda x, t: torch.nn.functional.linear(x.view(1, 5), t),
    "known op": lambda x, t: [x + torch.ones(5), x + torch.ones(5), x + t],
    "out=": lambda x, t: torch.add(x, x, out=t), "x.data = t": lambda x, t: setattr(x, "data", t),
    "x[...] = t": lambda x, t: x.__setitem__(slice(None), t),
    "x[1:] = t": lambda x, t: torch.cat([x, x[:1]]).__setitem__(slice(1, None), t),
    "from_full": lambda x, t: gt.from_full(t, P, x.sbp), "from_local": lambda x, t: gt.from_local(t, P, x.sbp),
    "from_shards": lambda x, t: gt.from_shards({0: t, 1: t}, P, x.sbp), "to_global": lambda x, t: t.to_global(P, x.sbp),
    "module": lambda x, t: torch.nn.ParameterList([torch.nn.Parameter(t, requires_grad=False)]).to_global(P, B),
}


def comes_in(door, kind, sbp):
    DOORS[door](numbers(sbp), KINDS[kind]())


def fits(door, kind):
    """Those of other shapes are refused for it, by torch. A module on the meta device is made global there."""
    if door == "module" and "meta" in kind:
        return False
    return kind not in ("csr", "nested", "jagged") or door not in ("linear", "einsum")


# ------------------------------------------------------------------------------- memory that a global tensor has not

HANDS = {                                            # what asks for the memory of x; refused
    "torch.from_dlpack": lambda x, t: torch.from_dlpack(x), "np.from_dlpack": lambda x, t: np.from_dlpack(x),
    "__dlpack__": lambda x, t: x.__dlpack__(), "share_memory_": lambda x, t: x.share_memory_(),
    "set_": lambda x, t: x.set_(t), "set_ to nothing": lambda x, t: x.set_(),
    "set_ of a plain tensor": lambda x, t: t.set_(x), "set_ to a storage": lambda x, t: x.set_(t.untyped_storage()),
    "storage address": lambda x, t: x.untyped_storage().data_ptr(),
    "typed storage address": lambda x, t: x.storage().data_ptr(),
    "storage saved": lambda x, t: torch.save(x.untyped_storage(), io.BytesIO()),
    "typed storage saved": lambda x, t: torch.save([x, x.storage()], io.BytesIO()),
    "storage on the CPU": lambda x, t: x.untyped_storage().cpu(),
    "storage swapped": lambda x, t: x.untyped_storage().byteswap(torch.float32),
}
HARMLESS = {                                         # an error of torch's own will do, and so will a storage on meta
    "to_dlpack": lambda x, t: torch.utils.dlpack.to_dlpack(x), "memoryview": lambda x, t: memoryview(x),
    "from_numpy": lambda x, t: torch.from_numpy(x), "frombuffer": lambda x, t: torch.frombuffer(x, dtype=torch.float32),
    "storage read": lambda x, t: x.untyped_storage().tolist(), "storage item": lambda x, t: x.untyped_storage()[0],
    "storage bytes": lambda x, t: bytes(x.untyped_storage()), "storage clone": lambda x, t: x.untyped_storage().clone(),
    "storage fill_": lambda x, t: x.untyped_storage().fill_(1),
    "storage copy_": lambda x, t: x.untyped_storage().copy_(t.untyped_storage()),
    "storage copied": lambda x, t: t.untyped_storage().copy_(x.untyped_storage()),
    "storage share_memory_": lambda x, t: x.untyped_storage().share_memory_(),
    "set_ to its storage": lambda x, t: t.set_(x.untyped_storage()),
    "typed storage": lambda x, t: x.storage().tolist(),
}


def hands_out(ask, sbp):
    ask(numbers(sbp), torch.zeros(5))


def harmless(ask, sbp):
    x, t = numbers(sbp), torch.zeros(5)
    try:
        given = ask(x, t)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        given = None
    same(x, torch.arange(5.0))
    assert torch.equal(t, torch.zeros(5))
    assert given is None or given.device.type == "meta", "it gave something"


def means(sbp):
    """What has an obvious meaning."""
    x = numbers(sbp)
    assert x.data_ptr() == 0 and x.untyped_storage().nbytes() == 20 == x.nbytes
    assert not hasattr(x, "__array_interface__") and not hasattr(x, "__cuda_array_interface__")
    assert np.asarray(x).tolist() == x.numpy().tolist() == [0, 1, 2, 3, 4]
    assert torch.from_dlpack(x.full_tensor()).tolist() == [0, 1, 2, 3, 4]


DATA = (its_own, trained, another, module, module_made_global, swapped, plain_data, meta_data, data_of_plain)
CASES = {f"{'refused: ' if case in (plain_data, meta_data) else ''}{case.__name__}, {name}": (case, (sbp,))
         for case in DATA for name, sbp in LAYOUTS.items()}
CASES |= {f"refused: {kind} by {door}, {name}": (comes_in, (door, kind, sbp)) for door in DOORS for kind in KINDS
          if fits(door, kind) for name, sbp in LAYOUTS.items() if name != "P"}
CASES |= {f"refused: {name}": (hands_out, (ask, S(0))) for name, ask in HANDS.items()}
CASES |= {name: (harmless, (ask, S(0))) for name, ask in HARMLESS.items()}
CASES |= {"what has a meaning": (means, (S(0),))}


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    for some in LAYOUTS.values():                    # what is loaded at first use is loaded once
        same(numbers(some), torch.arange(5.0))
    print(json.dumps(outcomes(CASES, lambda name: outcome(*CASES[name], name.startswith("refused")))))
