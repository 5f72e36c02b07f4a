"""The pages in docs/ keep up with the code: links into it lead to definitions, the rooms are the rooms."""
from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from builder.definitions import definitions
from harness import ROOT
from test_architecture import LAYERS

import globaltensor as gt

AS_PRINTED = (".S", ".B", ".P")                       # which the changelog says are no names
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def fragments(page: Path) -> list[tuple[str, str]]:
    """(path, fragment) of every link of a page that has one."""
    return re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_definitions(page):
    for path, name in fragments(page):
        file = (page.parent / path).resolve() if path else page
        assert name in definitions(file), f"{page.name} links {path}#{name}: there is no such definition"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_agree_about_gpus(page):
    """docs/gpu.md says what ran on one GPU; on several nothing ever ran. Every other page has to say so too."""
    text = " ".join(page.read_text().split())
    said = re.findall(r"never r[ua]n on \S+ ?\S*|A GPU has never|stand-in for a device", text)
    assert all("several" in words or "cluster" in words for words in said), f"{page.name} against docs/gpu.md: {said}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_are_there(page):
    for names in re.findall(r"(?<![\w.\"'/])gt((?:\.[A-Za-z_]\w*)+)", page.read_text()):
        one: object = gt
        for name in names[1:].split("."):
            if isinstance(one, (type, ModuleType)) and names not in AS_PRINTED:
                assert hasattr(one, name), f"{page.name}: there is no gt{names}"
                one = getattr(one, name)
            else:
                break


def test_the_design_links_what_a_newcomer_looks_for():
    """The rule of softmax, the step from P to S(0), the kernel that does it, where gradients are reduced."""
    files = {path.removeprefix("../") for path, _ in fragments(ROOT / "docs" / "design.md")}
    assert {"globaltensor/op_table/table.py", "globaltensor/boxings/route.py", "csrc/kernels/reduce.cpp",
            "globaltensor/tensors/gradients.py"} <= files


def test_a_link_to_nothing_is_found():
    table, kernel = ROOT / "globaltensor/op_table/table.py", ROOT / "csrc/kernels/reduce.cpp"
    assert "_softmax" in definitions(table) and "_softmox" not in definitions(table)
    assert "lines" in definitions(table.with_name("line.py"))
    assert "gt_reduce" in definitions(kernel) and "memcpy" not in definitions(kernel)
    assert "gt_corner" in definitions(kernel.with_name("region.h"))
    assert "Entry" in definitions(ROOT / "csrc/transport/control.h")
    assert "GlobalTensor.sbp" in definitions(ROOT / "globaltensor/tensors/global_tensor.py")


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
