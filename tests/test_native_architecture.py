"""csrc/: its layers, one name for one thing, and what is written in both languages agrees."""
from __future__ import annotations

import ast
import inspect
import itertools
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import cuda_library
import pytest
import torch
from harness import ROOT

from globaltensor.boxings import kernel_program, native as boxings_native, native_prices, plan, process_boxing
from globaltensor.dispatch import choose
from globaltensor.dispatch.native import FlatRecipe
from globaltensor.dispatch.siblings import _SIZE_ARGUMENTS, Siblings
from globaltensor.layouts import recent
from globaltensor.runtime import kernel_library, p2p, philox
from globaltensor.runtime.native import torch_ext
from globaltensor.tensors import native_specs

CSRC = ROOT / "csrc"
FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".h", ".cu"))
LAYERS = [                                           # low to high; rooms on one line do not include each other
    {"common"},
    {"kernels", "philox", "pricing"},
    {"transport"},
    {"process_group"},
    {"torch_ext"},
]
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}
needs_extension = pytest.mark.skipif(torch_ext is None, reason="the native code is not built")


@lru_cache
def code(path: Path) -> str:
    """A file without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)


def named(path: Path) -> str:
    return str(path.relative_to(CSRC))


# --------------------------------------------------------------------------------------------------- layers
def includes(path: Path) -> Iterator[Path]:
    """Our own headers that a file includes, written beside it or from csrc/."""
    for name in re.findall(r'#include "([^"]+)"', code(path)):
        found = [at for at in ((path.parent / name).resolve(), CSRC / name) if at.is_file()]
        assert found, f"{named(path)} includes {name}, which is not there"
        yield found[0]


def test_every_file_includes_only_from_the_layers_below():
    wrong = []
    for path in FILES:
        room = path.relative_to(CSRC).parts[0]
        assert room in LEVEL, f"{room} has no place in LAYERS"
        for header in includes(path):
            other = header.relative_to(CSRC).parts[0]
            if other != room and LEVEL[other] >= LEVEL[room]:
                wrong.append(f"{named(path)} includes {named(header)}")
    assert not wrong, wrong


def test_no_headers_include_each_other_in_a_circle():
    graph = {path: set(includes(path)) for path in FILES}
    done: set[Path] = set()
    while graph.keys() - done:
        free = {path for path in graph.keys() - done if graph[path] <= done}
        assert free, f"{sorted(map(named, graph.keys() - done))} include each other"
        done |= free


def test_files_teach_their_idea_and_stay_small():
    for path in FILES:
        lines = path.read_text().splitlines()
        pair = [file for file in path.parent.glob(f"{path.stem}.*") if file.read_text().startswith("//")]
        assert pair, f"{named(path)} does not begin with its idea"
        assert len(lines) <= 400, f"{named(path)} has {len(lines)} lines"
        wide = [i for i, line in enumerate(lines, 1) if len(line) > 120]
        assert not wide, f"{named(path)}: lines {wide} are longer than 120"


# --------------------------------------------------------------------------------------------------- names
def bound_names(text: str) -> list[str]:
    """What a file binds for Python: functions and attributes of the module, classes, and their members."""
    module = re.findall(r'\bm(?:odule)?\.(?:def|attr)\("(\w+)"', text)
    classes = re.findall(r'py(?:bind11)?::class_<.*?>\(m(?:odule)?, "(\w+)".*?;', text, re.S)
    bodies = re.findall(r'py(?:bind11)?::class_<.*?>\(m(?:odule)?, "(\w+)"(.*?);', text, re.S)
    members = [f"{name}.{member}" for name, body in bodies for member in re.findall(r'\.def\w*\("(\w+)"', body)]
    return [*module, *classes, *members]


def test_no_name_is_bound_twice():
    """pybind would make silently one overloaded function of two that have nothing to do with each other."""
    places = defaultdict(list)
    for path in FILES:
        for name in bound_names(code(path)):
            places[name].append(named(path))
    assert len(places) > 30 and not {name: where for name, where in places.items() if len(where) > 1}


def attributes_of(module: str, *folders: str) -> set[str]:
    """`name` of every `module.name` in the Python of these folders."""
    return {node.attr for folder in folders for path in (ROOT / folder).rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name | ast.Attribute | ast.Call)
            and ast.unparse(node.value) in (module, f"native.{module}", "_extension()", "extension")}


@needs_extension
def test_python_calls_what_is_bound_and_all_that_is_bound_is_called():
    bound = {name for name in dir(torch_ext) if not name.startswith("__")}
    assert attributes_of("torch_ext", "globaltensor", "tests", "benchmarks") == bound
    assert not [name for name in bound if "Overloaded function" in (getattr(torch_ext, name).__doc__ or "")]


def classes(text: str) -> Iterator[str]:
    """Structs, classes, unions and enums with a body, also those within another one; a specialization counts not."""
    head = r"\b(?:struct|class|union|enum(?:\s+class)?)\s+(?:alignas\(\d+\)\s+)?(\w+)\s*(?:final\s*)?(?::[^;{()]*)?\{"
    yield from re.findall(head, text)
    yield from re.findall(r"typedef struct \{.*?\n\} (\w+);", text, re.S)


def test_a_class_name_stands_for_one_class():
    places = defaultdict(list)
    for path in FILES:
        for name in classes(code(path)):
            places[name].append(named(path))
    assert len(places) > 100 and {"Recipe", "gt_region", "Message"} <= places.keys()
    assert places.pop("gt_on_device") == ["common/device.h"] * 2                     # for GPUs, and for threads
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_a_file_name_stands_for_one_idea():
    """Sources and headers of one idea share a folder; two folders share no name."""
    rooms = defaultdict(set)
    for path in FILES:
        rooms[path.stem].add(path.parent.name)
    assert not {stem: where for stem, where in rooms.items() if len(where) > 1}


# --------------------------------------------------------------------------------------------------- constants
def enum(path: str, name: str) -> dict[str, int]:
    """The values of a C enum, those that it counts by itself too."""
    body, = re.findall(rf"enum {name} (?::[^{{]*)?{{(.*?)}}", code(CSRC / path), re.S)
    values: dict[str, int] = {}
    for item in filter(None, map(str.strip, body.split(","))):
        key, _, value = map(str.strip, item.partition("="))
        values[key] = int(value) if value else max(values.values(), default=-1) + 1
    return values


def constant(path: str, name: str) -> int:
    """A #define, a constexpr or an enumerator that is given a number."""
    text = code(CSRC / path)
    value, = re.findall(rf"#define {name} (\d+)|\b{name} = ([\d']+)", text)
    return int("".join(value).replace("'", ""))


def layout_of(path: str, name: str) -> str:
    """A struct of int32_t and int64_t, as the module struct writes it."""
    body, = re.findall(rf"typedef struct {{([^}}]*)}} {name};", code(CSRC / path))
    letters = ""
    for kind, fields in re.findall(r"(int32_t|int64_t) ([^;]+);", body):
        for field in fields.split(","):
            count = re.search(r"\[GT_DIMS\]", field)
            letters += {"int32_t": "i", "int64_t": "q"}[kind] * (constant(path, "GT_DIMS") if count else 1)
    return letters


def expanded(format: str) -> str:
    return "".join(letter * int(count or 1) for count, letter in re.findall(r"(\d*)([a-z])", format))


def fields(path: str, struct_name: str) -> list[str]:
    body, = re.findall(rf"struct {struct_name} {{(.*?)\n}};", code(CSRC / path), re.S)
    return [name for line in re.findall(r"(?m)^  [\w:<>*]+ ([\w, ]+?)(?: = [^;]+)?;", body)
            for name in line.split(", ")]


def dtypes() -> dict[torch.dtype, int]:
    """torch's dtypes by the switch of dtype_code."""
    torch_names = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Char": "int8",
                   "Short": "int16", "Int": "int32", "Long": "int64", "Byte": "uint8", "Bool": "bool",
                   "ComplexFloat": "complex64", "ComplexDouble": "complex128"}
    codes = enum("common/dtype.h", "gt_dtype")
    cases = re.findall(r"case c10::k(\w+): return (\w+);", code(CSRC / "common/dtype_code.h"))
    return {getattr(torch, torch_names[name]): codes[value] for name, value in cases}


def keys_of_a_boxing_step() -> set[str]:
    tree = ast.parse(inspect.getsource(boxings_native))
    step, = [node for node in ast.walk(tree) if isinstance(node, ast.Dict) and len(node.keys) > 3]
    return {key.value for key in step.keys}


def strings_compared_with(name: str, function: object) -> set[str]:
    return {node.comparators[0].value for node in ast.walk(ast.parse(inspect.getsource(function)))
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == name}


def described() -> int:
    returned, = [node.value for node in ast.walk(ast.parse(inspect.getsource(native_specs._describe)))
                 if isinstance(node, ast.Return)]
    return len(returned.elts)


def signed(dtype: torch.dtype) -> torch.dtype:
    """Integers modulo 2**n are the same with a sign and without."""
    return getattr(torch, str(dtype).removeprefix("torch.u")) if str(dtype).startswith("torch.uint") else dtype


def number(name: str, file: str) -> float:
    """A constant of csrc/pricing."""
    return float(re.search(rf"\b{name} = ([\d.e-]+)", code(CSRC / "pricing" / file))[1])


# name on the page of twins -> (Python's, C++'s)
MIRRORED = {
    "DIMS": lambda: (kernel_program.DIMS, constant("kernels/region.h", "GT_DIMS")),
    "OPS": lambda: ([kernel_program.OPS[op] for op in ("sum", "max", "min")],
                    [*enum("common/dtype.h", "gt_op").values()]),
    "I_READ": lambda: ({f"GT_{name}": getattr(kernel_program, name) for name in
                        ("I_READ", "IT_READS", "I_WRITE", "IT_WRITES")}, enum("transport/transport.h", "gt_tie")),
    "_region": lambda: (expanded(kernel_program._region.format), layout_of("kernels/region.h", "gt_region")),
    "_corner": lambda: (expanded(kernel_program._corner.format), layout_of("kernels/region.h", "gt_corner")),
    "_CODES": lambda: (philox._CODES, {dtype: code for dtype, code in dtypes().items() if dtype in philox._CODES} | {
        dtype: dtypes()[signed(dtype)] for dtype in philox._CODES if dtype not in dtypes()}),
    "REDUCED": lambda: ([dtypes()[dtype] for dtype in kernel_library.REDUCED], [*range(len(kernel_library.REDUCED))]),
    "MAX_PENDING": lambda: (2 * p2p.MAX_PENDING <= constant("transport/transport.h", "GT_MESSAGES"), True),
    "KEPT": lambda: (recent.KEPT, constant("torch_ext/recipe_cache.cpp", "kKept")),
    "_describe": lambda: (described(), len({*fields("torch_ext/spec.h", "SpecTraits"), "sizes", "strides", "cuts"})),
    "FlatRecipe": lambda: (list(FlatRecipe._fields), re.findall(
        r'py::arg\("(\w+)"\)', code(CSRC / "torch_ext/recipe.cpp").partition("kw_only()")[2])),
    "Siblings": lambda: (list(Siblings._fields), re.findall(r'take\("(\w+)"', code(CSRC / "torch_ext/siblings.cpp"))),
    "_SIZE_ARGUMENTS": lambda: (sorted(_SIZE_ARGUMENTS), sorted(re.findall(
        r'"(\w+)"', re.search(r"names\{[^}]+", code(CSRC / "torch_ext/recipe_cache.cpp"))[0]))),
    "find_boxing": lambda: (keys_of_a_boxing_step(), {"op", "partners", "ties", "result", "sizes", "strides",
                                                           "reusable", "unmoved"} | set(
        re.findall(r'structs_from<\w+>\(fields, "(\w+)"\)', code(CSRC / "torch_ext/boxing.cpp")))),
    "_failed": lambda: (strings_compared_with("how", boxings_native._failed) <= set(
        re.findall(r'"(\w+)"', re.search(r"const char\* how = [^;]+", code(CSRC / "torch_ext/host.cpp"))[0])), True),
    "LIMITS": lambda: (native_prices.LIMITS, tuple(number(f"k{of}", "traffic.h") for of in ("Axes", "Dims"))),
    "OF_STEP": lambda: (plan.OF_STEP, number("kOfStep", "search.cpp")),
    "_EQUAL": lambda: ([choose._EQUAL, choose._NUDGE], [number(of, "choices.cpp") for of in ("kEqual", "kNudge")]),
    "RANKS": lambda: (process_boxing.RANKS, constant("kernels/reduce_cuda.h", "GT_CUDA_RANKS")),
    "BLOCKS": lambda: (process_boxing.BLOCKS, constant("kernels/reduce_cuda.h", "GT_CUDA_BLOCKS")),
    "NEEDS_ROOM": lambda: ([cuda_library.BAD_DTYPE, kernel_library.NEEDS_ROOM, cuda_library.MISALIGNED],
                          [*enum("kernels/reduce_cuda.h", "gt_cuda_status").values()][1:4]),
}


@pytest.mark.parametrize("name", MIRRORED)
def test_what_is_written_in_both_languages_agrees(name):
    python, native = MIRRORED[name]()
    assert python == native, f"{name}: {python} in Python, {native} in C++"


def test_every_pair_on_the_page_of_twins_is_compared():
    table = (ROOT / "docs" / "native-twins.md").read_text().partition("## Constants")[2].partition("\n## ")[0]
    names = set(itertools.chain.from_iterable(
        re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| [")))
    others = {"IT_READS", "I_WRITE", "IT_WRITES", "_NUDGE"}           # compared with I_READ and _EQUAL
    assert names - others == MIRRORED.keys()


def test_the_philox_library_is_called_as_it_is_declared():
    """ctypes checks nothing: the parameters that `_bind` gives each function against those in the header."""
    kinds = {"uint64_t": "c_ulong", "double": "c_double"}
    bound = ast.unparse(ast.parse(inspect.getsource(philox._bind)))
    for law, parameters in re.findall(r"int gt_fill_(\w+)\(void\* to, ([^)]*)\);", code(CSRC / "philox/fill.h")):
        own = [word for part in parameters.split(",")[4:] for word in part.split()[:1]]
        given = re.search(rf"'{law}': (?:(\d) \* )?\[(\w+)\]", bound)
        assert given and [given[2]] * int(given[1] or 1) == [f"c_{word.removesuffix('_t')}" for word in own], law
        assert all(word in kinds for word in own)


def test_the_numbers_are_read_as_a_compiler_reads_them():
    assert enum("common/dtype.h", "gt_op") == {"GT_SUM": 0, "GT_MAX": 1, "GT_MIN": 2}
    assert enum("kernels/reduce_cuda.h", "gt_cuda_status")["GT_CUDA_DTYPE"] == -1
    assert constant("torch_ext/recipe_cache.cpp", "kKept") == 2_000
    assert struct.calcsize(f"={layout_of('kernels/region.h', 'gt_region')}") == kernel_program._region.size
    assert fields("torch_ext/spec.h", "SpecTraits")[1:3] == ["dtype", "device"]


# --------------------------------------------------------------------------------------------------- torch
INTERNALS = ROOT / "docs" / "torch-internals.md"
# What torch documents for C++ extensions: its tensor, its values, its ops, its registration.
PUBLIC = re.compile(r"""
    at::(Tensor|TensorList|OptionalIntArrayRef|ArrayRef|k[A-Z]\w+|GradMode::is_enabled)
    | at::(bmm|cat|einsum|empty|empty_like|linear|matmul|mm|parallel_for|scalar_tensor|sub)
    | c10::(ArrayRef|IntArrayRef|SmallVector|List|IValue|SymInt|Device|DeviceType|Scalar|ScalarType(::Undefined)?)
    | c10::(k[A-Z]\w+|intrusive_ptr|make_intrusive|elementSize|toString|Error|DistBackendError)
    | torch::(Library(::IMPL)?|autograd::(AutogradContext|tensor_list))
    | TORCH_(CHECK\w*|WARN|LIBRARY_IMPL|EXTENSION_NAME|VERSION) | C10_(UN)?LIKELY
""", re.X)
OF_TORCH = re.compile(r"(?<![\w:])((?:c10d?|at|torch|sm)::(?:\w+::)*\w+|(?:THP|TORCH_|C10_|END_HANDLE_|HANDLE_)\w+"
                      r"|RECORD_FUNCTION|python_error|Py_SET_TYPE)")


def listed() -> dict[tuple[str, ...], set[str]]:
    """The names of a row -> its files, of the table of C++ names."""
    table = INTERNALS.read_text().partition("## In C++")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    return {tuple(re.findall("`(.*?)`", row[1])): set(re.findall("`(.*?)`", row[2])) for row in rows}


def files_with(names: tuple[str, ...]) -> set[str]:
    """Where names of the table are used, mostly by their last word: we have a Backend, too."""
    words = [name if name.startswith("c10d::") else name.rpartition("::")[2] for name in names]
    words = [{"Python": "DispatchKey::Python", "Function": "autograd::Function"}.get(word, word) for word in words]
    return {f"csrc/{named(path)}" for path in FILES if path.suffix != ".cu"
            and any(re.search(rf"(?<!\w){word}\b", code(path)) for word in words)}


def test_private_names_of_torch_are_on_their_page():
    rows = set(itertools.chain(*listed()))
    last = {name.rpartition("::")[2] for name in rows}

    def has_row(name: str) -> bool:                  # itself, its class, or a member of it
        return name.rpartition("::")[2] in last or any(
            row.startswith(f"{name}::") or name.startswith(f"{row}::") for row in rows)

    missing = {f"{named(path)}: {name}" for path in FILES if path.suffix != ".cu"
               for name in OF_TORCH.findall(code(path)) if not PUBLIC.fullmatch(name)
               and not has_row(name.replace("sm::", "c10d::symmetric_memory::"))}
    assert not missing, f"neither public nor in docs/torch-internals.md: {sorted(missing)}"


def test_the_page_names_the_files():
    wrong = {names[0]: sorted(files_with(names)) for names, files in listed().items() if files != files_with(names)}
    assert not wrong, f"python tests/test_native_architecture.py writes them anew: {wrong}"


if __name__ == "__main__":                           # writes the files of the C++ table
    page = INTERNALS.read_text()
    head, mark, rest = page.partition("## In C++")
    for names in listed():
        files = ", ".join(f"`{path}`" for path in sorted(files_with(names)))
        rest = re.sub(rf"(?m)^(\| `{re.escape(names[0])}`[^|]*\|)[^|]*\|", rf"\1 {files} |", rest)
    INTERNALS.write_text(head + mark + rest)
