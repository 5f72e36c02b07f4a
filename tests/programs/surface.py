"""The surface of torch on global tensors: methods, functions and modules, in layouts of all kinds, beside plain torch.

    python surface.py methods,functions,modules,without-memory N [name ...]

runs every N-th case and prints a line of JSON, case -> {"right": n, "refused": {error: n}, "wrong": [what], ...};
"raises" counts what plain torch refuses too, "no arguments" is true where none is known with which plain torch runs.
Each case runs in a child process: a death is told as a string.
"""
from __future__ import annotations

import itertools
import json
import os
import random
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.overrides import get_testing_overrides, is_tensor_method_or_property, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

sys.path.insert(0, str(Path(__file__).parent.parent))
from children import outcomes
from torch_calls import Arguments, by_signature, calls_of

import globaltensor as gt
from globaltensor.errors import GlobalTensorError

SEED = int(os.environ.get("SURFACE_SEED") or 20_261_122)
S, B, P = gt.sbp.split, gt.sbp.broadcast, gt.sbp.partial_sum
TWO, THREE = gt.placement("cpu", [0, 1]), gt.placement("cpu", [2, 0, 1])

# what is of the object, not of its value; and memory that nobody has written
OWN = {"__hash__", "__reduce__", "_version", "_python_dispatch", "is_global", "__reduce_ex__", "__setstate__",
       "__sizeof__", "__dir__", "__getstate__", "_cdata", "__repr__", "__str__", "_use_count", "const_data_ptr",
       "data_ptr", "storage", "untyped_storage", "_typed_storage", "__init__", "_reduce_ex_internal"}
UNWRITTEN = {"empty_like", "new_empty", "new_empty_strided", "resize_", "resize_as_", "new", "resize", "resize_as",
             "empty_permuted", "empty", "empty_strided", "fbgemm_pack_gemm_matrix_fp16"}
RANDOM = ("bernoulli", "dropout", "rand", "normal", "multinomial", "poisson", "exponential", "cauchy", "geometric",
          "rrelu", "uniform", "binomial", "gumbel", "fractional", "dirichlet", "lowrank", "philox", "lobpcg", "random")


OF_EITHER_SIGN = {"lobpcg", "svd_lowrank", "pca_lowrank"}


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def lay(t: torch.Tensor, where: Any, sbp: Any) -> torch.Tensor:
    """A plain tensor of the memory that everyone has, in a layout as near to this as it can be."""
    if t.layout != torch.strided or t.is_quantized or t.is_nested:
        return t
    if sbp.is_split and sbp.dim >= t.dim() or sbp.is_partial and t.dtype == torch.bool:
        sbp = B
    return gt.from_full(t.detach(), where, sbp).requires_grad_(t.requires_grad)


def layouts(n: int, name: str) -> Iterator[tuple[str, list[tuple[Any, Any]]]]:
    """Layouts for n tensors: all alike, and two mixtures."""
    yield "S(0)", [(THREE, S(0))] * n
    yield "B", [(TWO, B)] * n
    if n:
        yield "P", [(TWO, P)] * n
        yield "S(1)", [(TWO, S(1))] * n
    draw = random.Random(SEED ^ zlib.crc32(name.encode()))
    for _ in range(2 if n > 1 else 0):
        sbps = [draw.choice([S(0), S(1), S(2), B, P]) for _ in range(n)]
        yield " ".join(map(str, sbps)), [(THREE, sbp) for sbp in sbps]


def globally(args: Arguments, places: list[tuple[Any, Any]]) -> Arguments:
    """The arguments with global tensors for plain ones."""
    left = iter(places)
    return tree_map(lambda t: lay(deepcopy(t), *next(left)) if is_tensor(t) else deepcopy(t), args)


def value(x: Any) -> Any:
    """What a user reads of a result."""
    if isinstance(x, torch.Tensor) and x.is_global:
        return x.detach().full_tensor()
    return x.detach() if is_tensor(x) else x


class Different(Exception):
    """A result that is not plain torch's."""


def compare(got: Any, expected: Any, what: str, values: bool) -> None:
    """As plain torch's: structure, shapes, dtypes, and values unless they are nobody's."""
    ours, theirs = tree_flatten(got)[0], tree_flatten(expected)[0]
    if len(ours) != len(theirs):
        raise Different(f"{what}: {got!r:.150} for {expected!r:.150}")
    for a, b in zip(ours, theirs):
        if is_tensor(b) != is_tensor(a):
            raise Different(f"{what}: {a!r:.100} for {b!r:.100}")
        if is_tensor(b):
            compare_tensors(a, b, what, values)
        elif values and isinstance(b, (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)):
            close = isinstance(b, (float, complex)) and (abs(a - b) < 1e-4 or a != a and b != b)
            if not (a == b or close):
                raise Different(f"{what}: {a!r:.100} for {b!r:.100}")


def compare_tensors(a: torch.Tensor, b: torch.Tensor, what: str, values: bool) -> None:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        raise Different(f"{what}: {a.dtype} {tuple(a.shape)} {a.layout} for {b.dtype} {tuple(b.shape)} {b.layout}")
    if a.requires_grad != b.requires_grad:
        raise Different(f"{what}: requires_grad {a.requires_grad}")
    if values and b.device.type != "meta" and a.device.type != "meta":
        try:
            torch.testing.assert_close(value(a), value(b), equal_nan=True, rtol=2e-3, atol=2e-4)
        except AssertionError as error:
            raise Different(f"{what}: {error}"[:400]) from None


def called(call: Callable[..., Any], args: Arguments, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    gt.manual_seed(seed)
    return call(*args[0], **args[1])


class Counts:
    """What came of a case, layout by layout."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {"right": 0, "raises": 0, "refused": {}, "wrong": [], "no arguments": False}

    def add(self, which: str, ours: Callable[[], Any], theirs: Any, may_run: bool = False) -> None:
        """`theirs` is an exception where plain torch raises; then we must, too, unless we may run."""
        try:
            ours()
        except GlobalTensorError as error:
            first = str(error).splitlines()[0]
            self.said["refused"][first] = self.said["refused"].get(first, 0) + 1
        except Exception as error:
            if isinstance(theirs, Exception) and (isinstance(error, type(theirs)) or isinstance(theirs, type(error))):
                self.said["raises"] += 1
            else:
                self.said["wrong"].append(f"{which}: {type(error).__name__}: {error}"[:500])
        else:
            if isinstance(theirs, Exception) and not may_run:
                self.said["wrong"].append(f"{which}: runs, where torch says {theirs!r}"[:300])
            else:
                self.said["right"] += 1


def run_calls(name: str, call: Callable[..., Any], function: Any) -> dict[str, Any]:
    """A function or a method in every layout."""
    counts, last = Counts(), name.rpartition(".")[2].rpartition(" ")[2]
    samples = calls_of(name, function, call)
    if not samples:                                  # whatever it is, it is no reason to die
        counts.said["no arguments"], samples = True, [next(by_signature(function))]
    for args in samples:
        theirs = deepcopy(args)
        expected = outcome(call, theirs)
        n = sum(map(is_tensor, tree_flatten(args)[0]))
        for which, places in layouts(n, name):
            counts.add(which, lambda: one_call(last, call, args, places, expected, theirs), expected)
    return counts.said


def one_call(last: str, call: Any, args: Arguments, places: Any, expected: Any, theirs: Arguments) -> None:
    own, values = globally(args, places), last not in OWN | UNWRITTEN
    got = called(call, own)
    if isinstance(expected, Exception):
        return
    if any(word in last for word in RANDOM):         # the same in every layout
        compare(got, expected, "result", False)
        theirs = globally(args, [(TWO, B)] * len(places))
        expected = called(call, theirs)
    if last in OF_EITHER_SIGN:
        got, expected = (tree_map(lambda t: t.abs() if is_tensor(t) else t, x) for x in (got, expected))
    if last not in OWN:
        compare(got, expected, "result", values)
    compare(own, theirs, "operands", values)


def outcome(call: Any, args: Arguments) -> Any:
    """What it gives or raises."""
    try:
        return called(call, args)
    except Exception as error:
        return error


# ----------------------------------------------------------------------------------------- operands without memory

def freed(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().clone()
    t.untyped_storage().resize_(0)
    return t


def fake(t: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(t.detach())


NO_MEMORY = {"meta": lambda t: t.detach().to("meta"), "fake": fake, "freed": freed}


def run_without_memory(name: str, call: Callable[..., Any], function: Any) -> dict[str, Any]:
    """One operand has no memory, the others are global: refused, or it was not about the memory."""
    counts = Counts()
    if name.split()[1] in ("map_", "map2_"):         # which refuse subclasses after a look at the plain one's memory
        return counts.said
    for args in calls_of(name, function, call)[:1]:
        tensors = [t for t in tree_flatten(args)[0] if is_tensor(t)]
        for kind, position in itertools.product(NO_MEMORY, range(min(len(tensors), 3)) if len(tensors) > 1 else ()):
            if tensors[position].layout == torch.strided and not tensors[position].is_quantized:
                def ours(convert: Any = NO_MEMORY[kind], position: int = position) -> None:
                    own = one_without(args, position, convert)
                    with Alone() if convert is freed else nullcontext():
                        got = called(call, own)
                    if not any(is_tensor(t) and is_empty(t) for t in tree_flatten(got)[0]):
                        compare(got, called(call, deepcopy(args)), "result", name.split()[1] not in OWN | UNWRITTEN)
                theirs: Any = ReadAlone()
                if kind != "freed":                  # which plain torch would read
                    theirs = outcome(call, one_without(args, position, NO_MEMORY[kind], lambda t: t))
                counts.add(f"{kind} at {position}", ours, theirs, may_run=True)
    return counts.said


def is_empty(t: torch.Tensor) -> bool:
    """Has it no memory?"""
    return not t.is_global and (t.device.type == "meta" or type(t) is not torch.Tensor or
                                t.layout == torch.strided and t.untyped_storage().nbytes() == 0 < t.numel())


class Alone(TorchDispatchMode):
    """Inside it torch's composite functions are refused that read an operand without memory before a global one is met:
    plain torch ends the process there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_flatten((args, kwargs))[0] if is_tensor(t)]
        if tensors and not any(t.is_global for t in tensors) and any(map(is_empty, tensors)):
            raise ReadAlone(str(func))
        return func(*args, **kwargs or {})


class ReadAlone(Exception):
    pass


def one_without(args: Arguments, position: int, convert: Any, others: Any = lambda t: lay(t, TWO, S(0))) -> Arguments:
    count = itertools.count()
    return tree_map(lambda t: (convert if next(count) == position else others)(deepcopy(t)) if is_tensor(t)
                    else deepcopy(t), args)


# --------------------------------------------------------------------------------------------------------- modules

def modules() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db

    return {f"module {info.formatted_name}": (info, None) for info in module_db}


def some(things: list[Any], most: int = 5) -> list[Any]:
    """The first, the last and some between."""
    return things if len(things) <= most else [things[i * (len(things) - 1) // (most - 1)] for i in range(most)]


MODULES = {                                          # layouts of the parameters and of the inputs
    "B, S(0)": (B, S(0)), "S(0), B": (S(0), B), "S(0), S(0)": (S(0), S(0)), "B, P": (B, P), "S(1), S(1)": (S(1), S(1)),
    "plain, S(0)": (None, S(0)),
}


def run_module(name: str, info: Any, _: Any) -> dict[str, Any]:
    """Forward and backward, training and evaluation; the parameters and the inputs in several layouts."""
    counts = Counts()
    for training in (True, False):
        drawn = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
        for sample in some(drawn):
            torch.manual_seed(3)
            made = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            made.train(training)
            is_lazy = any(map(torch.nn.parameter.is_lazy, made.parameters()))     # what it draws, it draws from torch
            inputs = tree_map(lambda t: t.detach().requires_grad_(t.requires_grad) if is_tensor(t) else t,
                              (sample.forward_input.args, sample.forward_input.kwargs))
            expected, other = (outcome(trained, ((deepcopy(made), deepcopy(inputs), seed), {})) for seed in (1, 2))
            for which, (of_parameters, of_inputs) in MODULES.items():
                def ours() -> None:
                    got = in_layout(made, inputs, of_parameters, of_inputs)
                    if is_same(expected, other) or is_lazy:
                        compare(got, expected, "result or gradient", True)
                    else:                            # random, and so the same in every layout
                        compare(got, expected, "result or gradient", False)
                        compare(got, in_layout(made, inputs, B, B), "result or gradient", True)
                counts.add(f"{'train' if training else 'eval'} {sample.desc} {which}", ours, expected)
    return counts.said


def in_layout(made: Any, inputs: Arguments, of_parameters: Any, of_inputs: Any) -> Any:
    module = deepcopy(made)
    if of_parameters is not None:
        module.to_global(THREE, lambda name, p: B if of_parameters.is_split and of_parameters.dim >= p.dim()
                         else of_parameters)
    n = sum(map(is_tensor, tree_flatten(inputs)[0]))
    return trained(module, globally(inputs, [(THREE, of_inputs)] * n), 1)


def trained(module: Any, inputs: Arguments, seed: int) -> Any:
    """What it gives, and the gradients of the sum of its square."""
    gt.manual_seed(seed)
    torch.manual_seed(seed)
    got = module(*inputs[0], **inputs[1])
    results = [t for t in tree_flatten(got)[0] if is_tensor(t) and t.requires_grad]
    if results:
        sum((t * t).sum() for t in results).backward()
    leaves = [t for t in tree_flatten(inputs)[0] if is_tensor(t)] + [*module.parameters()]
    return got, [t.grad for t in leaves], [t.detach().clone() for t in module.buffers()]


def is_same(a: Any, b: Any) -> bool:
    try:
        compare(a, b, "", True)
        return True
    except Different:
        return False


# ------------------------------------------------------------------------------------------- methods and functions

FACE = {"placement", "sbp", "is_global", "to_global", "to_local", "full_tensor", "shards"}     # ours
# of classes and attributes, not of values
NOT_CALLED = {"__class__", "__init_subclass__", "__subclasshook__", "__new__", "__doc__", "__module__", "__weakref__",
              "__torch_function__", "__torch_dispatch__", "__annotations__", "__getattribute__", "__setattr__",
              "__delattr__", "_make_subclass", "_make_wrapper_subclass", "_dtensor__new__", "__deepcopy__", "__dict__",
              "__dlpack_c_exchange_api__", *FACE}


def methods() -> dict[str, Any]:
    """name -> (call, function) of what `x.name` gives."""
    cases = {}
    for name in dir(torch.Tensor):
        if name in NOT_CALLED:
            continue
        own = getattr(torch.Tensor, name, None)
        if callable(own):
            def call(x, *args, _name=name, **kwargs):
                return getattr(x, _name)(*args, **kwargs)
        else:
            def call(x, _name=name):
                return getattr(x, _name)
        cases[f"method {name}"] = (call, own)
    return cases


def functions() -> dict[str, Any]:
    cases = {}
    for function in get_testing_overrides():
        if not is_tensor_method_or_property(function):
            name = resolve_name(function) or f"{getattr(function, '__module__', None) or 'torch'}.{function.__name__}"
            cases[f"function {name}"] = (function, function)
    return cases


KINDS: dict[str, Any] = {                            # kind -> (cases, what is done with one)
    "methods": (methods, run_calls), "functions": (functions, run_calls), "modules": (modules, run_module),
    "without-memory": (lambda: methods() | functions(), run_without_memory),
}


def warm() -> None:
    """What is loaded at first use is loaded once, for all children."""
    import torch._dynamo
    import torch.testing._internal.common_methods_invocations

    x = gt.from_full(torch.rand(4, 4), TWO, S(0)).requires_grad_()
    (x @ x).relu().sum().backward()
    str(x)


def main(kinds: str, every: int, *chosen: str) -> None:
    cases = {}
    for kind in kinds.split(","):
        listed, run = KINDS[kind]
        for name, case in list(listed().items())[::every]:
            if not chosen or name in chosen:
                cases[name if kind != "without-memory" else f"{name} without memory"] = (run, name, *case)
    warm()
    print(json.dumps(outcomes(cases, lambda name: cases[name][0](*cases[name][1:]), timeout=240)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
