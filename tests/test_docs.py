"""The pages in docs/ keep up with the code: links into it lead to definitions, the rooms are the rooms."""
from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest
from harness import ROOT
from test_architecture import LAYERS

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@lru_cache
def defined(file: Path) -> frozenset[str]:
    """What a fragment of a link into this file may name."""
    text = file.read_text()
    if file.suffix == ".py":
        return frozenset(defined_in_python(text)) | (lines_of_the_table(text) if file.name == "table.py" else set())
    if file.suffix in (".cpp", ".h", ".cu"):
        return frozenset(defined_in_cpp(text))
    headings = re.findall(r"(?m)^#+ (.+)", re.sub(r"```.*?```", "", text, flags=re.S))
    return frozenset(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)


def defined_in_python(text: str) -> set[str]:
    """Functions, classes, their members as Class.member, and names that the module assigns."""
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def lines_of_the_table(text: str) -> set[str]:
    """The ops that have a line in the op table: the words of what is given to `lines`."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Name) and node.func.id == "lines" and isinstance(node.args[0], ast.Constant)]
    return {word for call in calls for word in call.args[0].value.split()}


def defined_in_cpp(text: str) -> set[str]:
    """Functions with a body, structs (those of a typedef, too), classes, enums, aliases, macros and constants."""
    text = re.sub(r'//[^\n]*|/\*.*?\*/|extern "C"', "", text, flags=re.S)
    named = (r"(?:\b(?:struct|class|enum|enum class|using|constexpr \w+|namespace)|#define)"
             r"\s+(?:alignas\(\w+\)\s+)?(\w+)")
    functions = r"(?m)^[\w:<>,&*\s]*?[\s&*](?:\w+::)?(\w+)\([^;{}]*\)(?: const)?(?: override)?\s*(?::[^;{]*)?\{"
    typedefs = r"typedef struct \w*\s*\{[^{}]*\}\s*(\w+);"
    return {*re.findall(named, text), *re.findall(functions, text), *re.findall(typedefs, text)}


def fragments(page: Path) -> list[tuple[str, str]]:
    """(path, fragment) of every link of a page that has one."""
    return re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_to_definitions(page):
    for path, name in fragments(page):
        file = (page.parent / path).resolve() if path else page
        assert name in defined(file), f"{page.name} links {path}#{name}: there is no such definition"


def test_the_design_links_what_a_newcomer_looks_for():
    """The rule of softmax, the step from P to S(0), the kernel that does it, where gradients are reduced."""
    files = {path.removeprefix("../") for path, _ in fragments(ROOT / "docs" / "design.md")}
    assert {"globaltensor/op_table/table.py", "globaltensor/boxings/route.py", "csrc/kernels/reduce.cpp",
            "globaltensor/tensors/gradients.py"} <= files


def test_a_link_to_nothing_is_found():
    table, kernel = ROOT / "globaltensor/op_table/table.py", ROOT / "csrc/kernels/reduce.cpp"
    assert "_softmax" in defined(table) and "lines" in defined(table) and "_softmox" not in defined(table)
    assert "gt_reduce" in defined(kernel) and "memcpy" not in defined(kernel)
    assert "gt_corner" in defined(kernel.with_name("region.h"))
    assert "Entry" in defined(ROOT / "csrc/transport/control.h")
    assert "GlobalTensor.sbp" in defined(ROOT / "globaltensor/tensors/global_tensor.py")


def test_the_rooms_of_the_design_are_those_of_the_code():
    drawn, = re.findall(r"```layers\n(.*?)```", (ROOT / "docs" / "design.md").read_text(), re.S)
    assert [set(line.split()) for line in reversed(drawn.splitlines())] == LAYERS


def native_names() -> set[str]:
    """What Python can call of the native code, and the plain C functions of the parts that know no torch."""
    bound = {name for path in (ROOT / "csrc").rglob("*.cpp") for name in
             re.findall(r'\bm(?:odule)?\.(?:def|attr|impl)\("(\w+)"|pybind11::class_<.*>\(m(?:odule)?, "(\w+)"'
                        r'|py::class_<.*>\(m, "(\w+)"', path.read_text())}
    headers = ("kernels/region.h", "transport/transport.h", "philox/fill.h")
    return {"".join(name) for name in bound} | {
        name for header in headers
        for name in re.findall(r"(?m)^[a-z][\w *]*?\b(gt_\w+)\(", (ROOT / "csrc" / header).read_text())}


def test_every_native_function_has_its_twin_or_says_why_not():
    page = (ROOT / "docs" / "native-twins.md").read_text()
    tables = page.partition("## Constants")[0]
    missing = {name for name in native_names() if f"`{name}`" not in tables}
    assert not missing, f"docs/native-twins.md does not tell of {sorted(missing)}"
    assert {"dispatch", "gt_reduce"} <= set(re.findall(r"`(\w+)`", tables)) and "gt_run_moves" in native_names()
