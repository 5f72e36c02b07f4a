"""What type checkers read and nothing imports when the program runs: two stubs, made from torch's own.

    python tests/typed/generate.py            # writes them anew

tensor_methods.pyi   torch's methods as a global tensor has them: the same signatures, with GlobalTensor where torch's
                     say Tensor. Only what a method returns is changed, and only methods that return a tensor are
                     written down: the others are inherited.
torch_names.pyi      the names of torch that `gt` has and does not have from us: `gt.matmul`, `gt.nn`, ...
"""
from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys
import types

import torch

import globaltensor as gt

ROOM = pathlib.Path(gt.__file__).parent / "tensors"
VERSION = torch.__version__.split("+")[0]
TORCH = pathlib.Path(torch.__file__).parent

HEAD = f'''"""The methods of torch {VERSION}, as a GlobalTensor has them. Written by tests/typed/generate.py."""
# A method of ours returns less than torch's may, a named tuple of ours is not torch's class of that name, and torch's
# own overloads overlap, its generics are bare, and its names with an underscore are not exported.
# mypy: disable-error-code="override, overload-overlap, overload-cannot-match, misc, type-arg, attr-defined"
# pyright: basic, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# pyright: reportOverlappingOverload=false
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, Literal, NamedTuple, SupportsIndex, Union, overload

import torch
from torch import Generator, Size, SymInt, Tensor, inf, memory_format
from torch._C import _Index
from torch._prims_common import DeviceLikeType
from torch.storage import TypedStorage, UntypedStorage
from torch.types import (
    IntLikeType, Number, Storage, _bool, _bytes, _complex, _device, _dispatchkey, _dtype, _float, _int, _layout,
    _qscheme, _size, _symsize,
)

from globaltensor.tensors.global_tensor import GlobalTensor

'''

ATTRIBUTES = ("T", "H", "mT", "mH", "real", "imag")
OURS = {"new", "new_tensor", "numpy", "cpu_"}        # GlobalTensor has its own: they give plain tensors

# torch's methods in Python that say nothing of what they return
UNTYPED = """
def backward(self, gradient: Tensor | None = None, retain_graph: _bool | None = None, create_graph: _bool = False,
             inputs: Any = None) -> None: ...
def register_hook(self, hook: Callable[[GlobalTensor], Tensor | None]) -> Any: ...
def __iter__(self) -> Iterator[GlobalTensor]: ...
def __reversed__(self) -> GlobalTensor: ...
def norm(self, p: _float | str | None = "fro", dim: Any = None, keepdim: _bool = False,
         dtype: torch.dtype | None = None) -> GlobalTensor: ...
def split(self, split_size: Any, dim: _int = 0) -> tuple[GlobalTensor, ...]: ...
def unflatten(self, dim: Any, sizes: Any) -> GlobalTensor: ...
def stft(self, *args: Any, **options: Any) -> GlobalTensor: ...
def istft(self, *args: Any, **options: Any) -> GlobalTensor: ...
"""


class Ours(ast.NodeTransformer):
    """GlobalTensor for Tensor, and our named tuples for torch's; notes which of those are needed."""

    def __init__(self) -> None:
        self.tuples: set[str] = set()

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("GlobalTensor") if node.id == "Tensor" else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        text = ast.unparse(node)
        if text == "torch.Tensor":
            return ast.Name("GlobalTensor")
        if text.startswith("torch.return_types."):
            self.tuples.add(node.attr)
            return ast.Name(f"_{node.attr}")
        return node


def methods(ours: Ours) -> list[ast.FunctionDef]:
    """Every overload of every method of which one returns a tensor."""
    stub = ast.parse((TORCH / "_C" / "__init__.pyi").read_text())
    base = next(node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "TensorBase")
    own = ast.parse((TORCH / "_tensor.py").read_text())
    tensor = next(node for node in own.body if isinstance(node, ast.ClassDef) and node.name == "Tensor")
    typed = [node for node in tensor.body if isinstance(node, ast.FunctionDef) and node.returns is not None]
    by_name: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.parse(UNTYPED).body:
        assert isinstance(node, ast.FunctionDef)
        by_name[node.name] = [node]
    done = said_by_us = set(by_name)
    for group in (typed, base.body):
        for node in group:
            if isinstance(node, ast.FunctionDef) and node.name not in done and node.name not in OURS \
                    and (node.name.startswith("__") or not node.name.startswith("_")):
                by_name.setdefault(node.name, []).append(node)
        done = set(by_name)
    result = []
    for _, group in sorted(by_name.items()):
        before = [ast.unparse(node.returns) for node in group if node.returns]
        for node in group:
            returns = ast.parse(node.returns.value, mode="eval").body if isinstance(node.returns, ast.Constant) \
                and isinstance(node.returns.value, str) else node.returns
            node.returns = ours.visit(returns) if returns is not None else None
            node.body = [ast.Expr(ast.Constant(...))]
            node.decorator_list = [d for d in node.decorator_list if ast.unparse(d) == "overload"]
        if [ast.unparse(node.returns) for node in group if node.returns] != before or group[0].name in said_by_us:
            result += group
    return result


def named_tuples(names: set[str]) -> str:
    """torch's structs of several results, with global fields."""
    rows = []
    for node in ast.parse((TORCH / "return_types.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            fields = [f.name for f in node.body if isinstance(f, ast.FunctionDef)
                      and any(ast.unparse(d) == "property" for d in f.decorator_list)]
            rows.append(f"class _{node.name}(NamedTuple):\n" + "".join(f"    {f}: GlobalTensor\n" for f in fields))
    return "\n".join(rows)


def tensor_methods() -> str:
    ours = Ours()
    rows = []
    for node in methods(ours):
        rows += [f"    @{ast.unparse(d)}" for d in node.decorator_list]
        node.decorator_list = []
        rows.append("    " + ast.unparse(node).replace(":\n    ...", ": ..."))
    head = HEAD + named_tuples(ours.tuples)
    kept = [f"    {name}: GlobalTensor" for name in ATTRIBUTES]
    return "\n".join([head, "class TensorMethods(Tensor):", *kept, *rows, ""])


def torch_names() -> str:
    """Those that torch's own stubs know."""
    names = [name for name, value in vars(torch).items() if not name.startswith("_") and name not in gt.FACE
             and (not isinstance(value, types.ModuleType) or value.__name__.startswith("torch."))]
    names = sorted({*names, "onnx"})                 # torch loads it when it is asked for
    said = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "-c",
                           "".join(f"from torch import {name} as {name}\n" for name in names)],
                          capture_output=True, text=True, check=False, cwd="/").stdout
    unknown = set(re.findall(r'attribute "(\w+)"', said))
    rows = [f"from torch import {name} as {name}" for name in names if name not in unknown]
    head = f'"""The names of torch {VERSION} that gt has too. Written by tests/typed/generate.py."""'
    return "\n".join([head, *rows, ""])


if __name__ == "__main__":
    (ROOM / "tensor_methods.pyi").write_text(tensor_methods())
    (ROOM / "torch_names.pyi").write_text(torch_names())
