"""The layer rule of the package, and that importing it starts nothing."""
from __future__ import annotations

import ast
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from globaltensor import FACE
from globaltensor.runtime.native import WANTED, torch_ext

PACKAGE = pathlib.Path(__file__).parent.parent / "globaltensor"

LAYERS = [                                           # low to high; rooms on one line do not import each other
    {"errors"},
    {"tracebacks"},
    {"layouts", "schedules"},
    {"runtime"},
    {"pictures"},
    {"rules", "boxings"},
    {"algorithms"},
    {"op_table"},
    {"dispatch"},
    {"tensors"},
    {"parallel", "checkpoint", "data"},
    {"debug"},
    {"pipelining", "simulator", "dtensor", "trainers"},
    {"planner", "playground"},
    {"__init__"},
    {"cli", "__main__"},
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


def test_one_function_tells_that_torch_compiles():
    """torch's own is True only of what dynamo traces, before torch 2.13."""
    asking = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if ".is_compiling" in path.read_text()]
    assert asking == [INTERNALS], f"outside of {INTERNALS} its `compiling`: {asking}"


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


INTERNALS = "runtime/torch_internals.py"
PAGE = (PACKAGE.parent / "docs" / "torch-internals.md").read_text().partition("## In C++")[0]
LISTED = {name for row in re.findall(r"(?m)^\| (`.*?) \|", PAGE) for name in re.findall(r"`(.+?)`", row)}
OF_PYTHON = {"_replace", "_asdict", "_fields", "_getframe", "_current_frames", "_exit", "_actions",
             "_choices_actions", "_SubParsersAction", "_width", "_run_module_as_main"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.expr, known: dict[str, str]) -> str | None:
    """`torch._C.x` for an expression of that form, where `known` tells what the file's names stand for."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, known)
        return base and f"{base}.{node.attr}"
    return known.get(node.id) if isinstance(node, ast.Name) else None


def private_names_of_torch(path: pathlib.Path):
    """(line, name) of the names in torch's modules that begin with an underscore, or are in such a module. Names of ops
    do not count."""
    known: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            known |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                      for a in node.names if a.name.partition(".")[0] == "torch"}
            found = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            found = [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value and (name := dotted(node.value, known)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            known |= {target.id: name} if isinstance(target, ast.Name) else {}
            continue
        else:
            found = [dotted(node, known) or ""] if isinstance(node, ast.Attribute) else []
        for name in found:
            if re.match(r"torch\.(?!ops\.)", name) and any(map(is_private, name.split("."))):
                yield node.lineno, name


def private_attributes() -> dict[str, str]:
    """Private attributes that the package reads and nowhere makes, each with a place."""
    made, read = set(OF_PYTHON), {}
    for path in sorted(PACKAGE.rglob("*.py")):
        known = {"torch": "torch", "dist": "torch", "aten": "torch", "_c": "torch"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                made.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                made.add(node.id)
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and not dotted(node, known):
                if isinstance(node.ctx, ast.Store):
                    made.add(node.attr)
                else:
                    read.setdefault(node.attr, f"{path.relative_to(PACKAGE)}:{node.lineno}")
    return {name: place for name, place in read.items() if name not in made}


def test_no_function_is_decorated_with_a_context_manager():
    """contextlib's wrapper is none of ours: torch.compile would trace it, and warn of the native code that it meets."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    functions = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)
                 if isinstance(node, ast.FunctionDef)]
    managers = {node.name for _, node in functions if "contextmanager" in map(ast.unparse, node.decorator_list)}
    assert "not_counted" in managers
    assert not [f"{path.name}: {node.name}" for path, node in functions for one in node.decorator_list
                if isinstance(one, ast.Call) and ast.unparse(one.func).rpartition(".")[2] in managers]


def test_private_names_of_torch_are_taken_from_one_file():
    wrong = [f"{path.relative_to(PACKAGE)}:{line}: {name}" for path in sorted(PACKAGE.rglob("*.py"))
             if path != PACKAGE / INTERNALS for line, name in private_names_of_torch(path)]
    assert not wrong, f"take them from {INTERNALS}:\n" + "\n".join(wrong)


def test_what_is_private_to_torch_is_on_its_page():
    names = {name for _, name in private_names_of_torch(PACKAGE / INTERNALS)}
    names = {name for name in names if not any(longer.startswith(f"{name}.") for longer in names | LISTED)}
    attributes = {name.rpartition(".")[2] for name in LISTED}
    missing = sorted(names - LISTED) + [f".{name} ({place})" for name, place in private_attributes().items()
                                        if name not in attributes]
    assert not missing, f"not in docs/torch-internals.md: {missing}"


def test_the_page_of_privates_lists_only_what_is_used():
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    unused = [name for name in LISTED if not re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", text)]
    assert LISTED and not unused, unused


EVERYWHERE = {"main", "command"}          # of the commands of cli: one interface


def test_a_function_name_stands_once():
    """But for names of the face, such as gt.normal, whose kernel may be called as they are."""
    homes: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}:
            homes.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    assert homes.keys() >= EVERYWHERE
    twice = {name: files for name, files in homes.items() if len(files) > 1 and name not in EVERYWHERE | FACE.keys()}
    assert not twice, f"a function says by its name which one it is: {twice}"


_MAKES = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal",
          "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}
_MAKES_FLOATS = {"empty", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}


def test_what_the_library_makes_for_itself_does_not_follow_the_defaults_of_a_program():
    """torch.set_default_device and set_default_dtype are for what the program makes."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MAKES
                    and ast.unparse(node.func.value) == "torch"):
                given = {keyword.arg for keyword in node.keywords}
                lacks = {"device", *({"dtype"} if node.func.attr in _MAKES_FLOATS else ())} - given
                if lacks and None not in given:      # **extra: what the program asks for
                    wrong.append(f"{path}:{node.lineno}: torch.{node.func.attr} without {sorted(lacks)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("real_processes")
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
