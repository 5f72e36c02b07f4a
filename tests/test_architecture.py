"""The layer rule of the package, and that importing it starts nothing."""
from __future__ import annotations

import ast
import pathlib
import shutil
import subprocess
import sys

import pytest

from globaltensor.runtime.native import WANTED, torch_ext

PACKAGE = pathlib.Path(__file__).parent.parent / "globaltensor"

LAYERS = [                                           # low to high; rooms on one line do not import each other
    {"errors"},
    {"layouts", "schedules"},
    {"runtime"},
    {"rules", "boxings"},
    {"algorithms"},
    {"op_table"},
    {"dispatch"},
    {"tensors"},
    {"parallel", "checkpoint", "data", "debug"},
    {"pipelining", "simulator"},
    {"__init__"},
    {"cli"},
]
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}


def imports(path: pathlib.Path):
    """(line, module of the package) of every import in a file, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "globaltensor" else [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "globaltensor":
                yield node.lineno, (name.split(".") + ["__init__"])[1]


def test_every_file_imports_only_from_the_layers_below():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        assert own in LEVEL, f"{own} stands in no layer"
        for line, other in imports(path):
            if other != own and LEVEL.get(other, len(LAYERS)) >= LEVEL[own]:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {own} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_circle_within_a_package():
    for package in [p for p in PACKAGE.iterdir() if (p / "__init__.py").exists()]:
        graph = {}
        for path in package.glob("*.py"):
            tree = ast.parse(path.read_text())
            graph[path.stem] = {a for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
                                for a in ([n.name for n in node.names] if node.module == f"globaltensor.{package.name}"
                                          else [node.module.split(".")[-1]]
                                          if node.module.startswith(f"globaltensor.{package.name}.") else [])}
        order: list[str] = []
        while graph.keys() - order:
            free = [m for m in graph if m not in order and not (graph[m] & graph.keys()) - set(order) - {m}]
            assert free, f"{package.name}: {sorted(graph.keys() - order)} import each other"
            order += free


def test_files_and_functions_stay_small():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 400, f"{path.name} has {len(text.splitlines())} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name} is too long"


def test_every_file_begins_by_teaching_its_idea():
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_a_class_name_stands_once():
    homes: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    assert not twice, f"a class says by its name which one it is: {twice}"


def test_one_idiom_asks_whether_a_tensor_is_global():
    """Below the tensor class `is_global(x)` of global_like.py, above it isinstance; `x.is_global` is for users."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room, name = path.relative_to(PACKAGE).parts[0], str(path.relative_to(PACKAGE))
        above = LEVEL[path.relative_to(PACKAGE).with_suffix("").parts[0]] > LEVEL["tensors"]
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Name("hasattr" | "getattr"), [_, ast.Constant("spec" | "is_global"), *_]):
                    idiom = name != "layouts/global_like.py"
                case ast.Attribute(value, "is_global", ast.Load()):
                    idiom = room != "checkpoint" or ast.unparse(value) not in ("e", "entry")
                case ast.ImportFrom("globaltensor.layouts.global_like"):
                    idiom = above
                case ast.BinOp(ast.Tuple([ast.Name("broadcast")]), ast.Mult()):
                    idiom = room != "layouts"        # they have `replicated`
                case _:
                    continue
            wrong += [f"{name}:{node.lineno}: {ast.unparse(node)}"] if idiom else []
    assert not wrong, "\n".join(wrong)


def test_importing_starts_nothing():
    code = ("import globaltensor, torch, sys; from globaltensor.runtime.world import started;"
            "assert started() is None and not torch.distributed.is_initialized();"
            "assert not torch.cuda.is_initialized();"
            "heavy = {'torch.utils.cpp_extension', 'matplotlib', 'rich', 'scipy', 'torch.distributed.run'};"
            "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(shutil.which("g++") is None or not WANTED, reason="no g++, or GLOBALTENSOR_NATIVE=0")
def test_the_native_code_is_there_where_it_can_be_built():
    assert torch_ext is not None, "tests of native code skip themselves without it"
