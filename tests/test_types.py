"""Types as users' type checkers see them: our programs pass, mistakes do not, and nothing public gives Any."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from harness import PYTHON, ROOT, environment, good
from test_readme import PROGRAMS
from typed import generate

import globaltensor as gt

TYPED = ROOT / "tests" / "typed"
GLOBAL = "globaltensor.tensors.global_tensor.GlobalTensor"
MYPY = [PYTHON, "-m", "mypy", "--no-error-summary", "--no-color-output", "--hide-error-context",
        f"--cache-dir={ROOT / '.mypy_cache' / 'users'}"]
STRICT = """
[mypy]
[mypy-accelerate.*,lightning.*]
ignore_missing_imports = True
[mypy-programs]
disallow_any_generics = True
disallow_subclassing_any = True
disallow_untyped_calls = True
disallow_untyped_defs = True
disallow_incomplete_defs = True
check_untyped_defs = True
disallow_untyped_decorators = True
warn_unused_ignores = True
warn_return_any = True
implicit_reexport = False
strict_equality = True
extra_checks = True
"""                                                  # what --strict means for one file

SET_UP = """
import torch
import globaltensor as gt
P = gt.placement("cpu", [0, 1])
S0 = gt.sbp.split(0)
t = torch.ones(4, 4)
x = gt.ones(4, 4, placement=P, sbp=S0)
linear = torch.nn.Linear(4, 4)
adam = torch.optim.Adam(linear.parameters())
"""

GLOBALS = [                                          # these are global tensors
    "gt.zeros(2, placement=P, sbp=S0)", "gt.ones((2, 3), placement=P, sbp=S0)", "gt.empty(2, placement=P, sbp='B')",
    "gt.full((2,), 1.0, placement=P, sbp='B')", "gt.arange(4, placement=P, sbp=S0)",
    "gt.arange(start=1, end=4, placement=P, sbp=S0)", "gt.arange(1, 4, step=0.5, placement=P, sbp=S0, dtype=None)",
    "gt.arange(end=4, placement=P, sbp=S0)", "gt.linspace(start=0, end=t.sum(), steps=4, placement=P, sbp=S0)",
    "gt.eye(n=4, m=2, placement=P, sbp=S0)", "gt.randint(low=0, high=5, size=[4], placement=P, sbp=S0)",
    "gt.randperm(n=4, generator=torch.Generator(), placement=P, sbp=S0)", "gt.zeros(size=[2], placement=P, sbp=S0)",
    "gt.linspace(0, 1, 4, placement=P, sbp=S0)", "gt.logspace(0, 1, 4, placement=P, sbp=S0)",
    "gt.eye(4, placement=P, sbp=S0)", "gt.tensor([1.0], placement=P, sbp='B')", "gt.rand(4, placement=P, sbp=S0)",
    "gt.randn(4, placement=P, sbp=S0)", "gt.randint(0, 5, (4,), placement=P, sbp=S0)",
    "gt.randperm(4, placement=P, sbp=S0)", "gt.normal(0.0, 1.0, (4,), placement=P, sbp=S0)",
    "gt.zeros_like(t, placement=P, sbp=S0)", "gt.ones_like(x)", "gt.empty_like(x, sbp='B')",
    "gt.full_like(x, 1.0, placement=P)", "gt.rand_like(x, generator=torch.Generator())",
    "gt.randn_like(t, placement=P, sbp=S0)", "gt.randint_like(t, 0, 5, placement=P, sbp=S0)",
    "gt.from_full(t, P, S0)", "gt.from_local(t, P, S0)", "gt.from_shards({0: t, 1: t}, P, S0)",
    "x.to_global(sbp='B')", "x + x", "x - 1", "2 * x", "x / x", "x @ x", "x ** 2", "-x", "1 - x", "t + x", "t @ x",
    "x == x", "x > 0", "x.sum()", "x.sum(0)", "x.mean(dim=1)", "x.view(2, 8)", "x.reshape(-1)", "x.T", "x.mT",
    "x[0]", "x[:, None]", "x.max()", "x.max(0).values", "x.sort().indices", "x.chunk(2)[0]", "x.split(2)[0]",
    "x.float()", "x.to(torch.float64)", "x.cpu()", "x.detach()", "x.clone()", "x.data", "x.contiguous()",
    "x.requires_grad_()", "x.relu()", "x.softmax(-1)", "x.matmul(t)", "x.add_(1)", "x.new_zeros(2)", "x.norm()",
    "next(iter(x))", "x.unflatten(0, (2, 2))", "x.masked_fill(x > 0, 0.0)", "x.where(x > 0, x)", "x.real",
]

REVEALED = {                                         # what a user writes: its type
    **dict.fromkeys(GLOBALS, GLOBAL),
    "x.grad": f"{GLOBAL} | None",
    "x.sbp": "tuple[globaltensor.layouts.sbp.Sbp, ...]",
    "x.placement": "globaltensor.layouts.placement.placement",
    "x.shards": "dict[int, torch._tensor.Tensor]",
    "x.is_global": "bool",
    "x.to_local()": "torch._tensor.Tensor",
    "x.full_tensor()": "torch._tensor.Tensor",
    "x.backward()": "None",
    "x.numpy()": "numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]",
    "x.shape": "torch._C.Size",
    "P.ranks": "tuple[Any, ...]",
    "P.shape": "tuple[int, ...]",
    "P.axis_names": "tuple[str, ...] | None",
    "gt.placement.all('cpu')": "globaltensor.layouts.placement.placement",
    "S0": "globaltensor.layouts.sbp.Sbp",
    "gt.sbp.broadcast": "globaltensor.layouts.sbp.Sbp",
    "gt.to_global(linear, P, 'B')": "torch.nn.modules.linear.Linear",
    "gt.parallelize(linear, P)": "torch.nn.modules.linear.Linear",
    "gt.zero(adam)": "torch.optim.adam.Adam",
    "gt.export_ranks(linear, (x,))": "torch.export.exported_program.ExportedProgram",
    "gt.Plan.of(linear)": "globaltensor.parallel.plan.Plan", "gt.Strategy()": "globaltensor.planner.strategy.Strategy",
    "gt.strategy(linear, t)": "globaltensor.planner.strategy.Strategy",
    "gt.rank()": "int",
    "gt.world_size()": "int",
    "gt.config.cache_bytes": "int",
    "gt.audit(linear, adam)": "int",
    "gt.metrics(tokens=1, every_rank=True)": "dict[str, float]",
    "gt.export_chrome_trace(None, 'trace.json')": "None",
    "gt.init()": "globaltensor.runtime.world.World",
    "gt.record().__enter__()": "globaltensor.boxings.watch.Record",
    "gt.boxing('forbid').__enter__()": "None",
    "gt.explain(lambda: x)": "globaltensor.debug.explain.Explanation",
    "gt.save({}, 'folder', asynchronous=True)": "globaltensor.checkpoint.saving.Saving",
    "gt.save({}, 'folder')": "globaltensor.checkpoint.saving.Saving | None",
    "gt.resume({'step': 1}, 'folder')": "dict[str, int]",
    "gt.preempted()": "bool",
    "gt.REQUEUE": "int",
    "gt.load_safetensors(linear, 'folder')": "torch.nn.modules.linear.Linear",
    "gt.save_safetensors(linear, 'folder')": "None",
    "gt.pipeline(linear, [P])": "globaltensor.pipelining.runner.PipelineRunner",
    "gt.pipeline(linear, [P]).step(t)": GLOBAL,
    "gt.randn(4)": "torch._tensor.Tensor",
    "gt.zeros(4, device='cpu')": "torch._tensor.Tensor",
    "gt.arange(start=1, end=4, device='cpu')": "torch._tensor.Tensor",
    "gt.linspace(0, 1, steps=4, dtype=torch.float64)": "torch._tensor.Tensor",
    "gt.eye(4, 2, requires_grad=True)": "torch._tensor.Tensor",
    "gt.tensor([1.0], device=torch.device('cpu'))": "torch._tensor.Tensor",
    "gt.randint(5, (4,), generator=torch.Generator())": "torch._tensor.Tensor",
    "gt.normal(0.0, 1.0, (4,))": "torch._tensor.Tensor",
    "gt.normal(0.0, t)": "torch._tensor.Tensor",
    "gt.normal(t)": "torch._tensor.Tensor",
    "gt.zeros_like(t)": "torch._tensor.Tensor",
    "gt.full_like(t, 1.0, memory_format=torch.preserve_format)": "torch._tensor.Tensor",
    "gt.randint_like(t, 5, dtype=torch.int64)": "torch._tensor.Tensor",
    "gt.matmul(t, t)": "torch._tensor.Tensor",
    "gt.float32": "torch._C.dtype",
    "gt.nn.Linear(2, 2)": "torch.nn.modules.linear.Linear",
    "gt.manual_seed(0)": "torch._C.Generator",
    "gt.cuda.is_available()": "bool",
}


def about(said: str, name: str) -> list[str]:
    """The lines about one file."""
    return [line for line in said.splitlines() if re.match(rf"(\S*/)?{re.escape(name)}:\d+", line)]


def pages(folder: Path) -> list[Path]:
    """The programs of the README, of docs/ and of examples/, as files."""
    files = [ROOT / "examples" / name for name in sorted(os.listdir(ROOT / "examples")) if name.endswith(".py")]
    for name, (code, _) in PROGRAMS.items():
        files.append(folder / f"page_{re.sub('[^a-z0-9]+', '_', name.lower())}.py")
        files[-1].write_text(code)
    return files


@pytest.fixture(scope="module")
def revealing(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("types") / "revealing.py"
    file.write_text(SET_UP + "".join(f"reveal_type({text})\n" for text in REVEALED))
    return file


@pytest.fixture(scope="module")
def said(revealing, tmp_path_factory) -> str:
    """What mypy says about all the programs, from outside the repository. The first test process to come asks it, for
    all. What it knows of torch is kept: reading it anew takes half a minute."""
    of_this_run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    report = tmp_path_factory.getbasetemp().parent / f"mypy-{of_this_run}.txt"
    with FileLock(report.with_suffix(".lock")):
        if not report.exists():
            (revealing.parent / "mypy.ini").write_text(STRICT)
            files = [revealing, TYPED / "programs.py", TYPED / "mistakes.py", *pages(revealing.parent)]
            kept = ["--config-file=mypy.ini", f"--cache-dir={ROOT}/.mypy_cache/users"]
            run = subprocess.run([*MYPY, *kept, *map(str, files)], capture_output=True, text=True,
                                 cwd=revealing.parent, timeout=500, env=environment(MYPYPATH=str(ROOT)), check=False)
            assert run.returncode in (0, 1) and not run.stderr, run.stdout + run.stderr
            report.write_text(run.stdout)
    return report.read_text()


def plain(text: str) -> str:
    return text.replace("builtins.", "").replace("Union[", "").replace(", fallback=...", "")


def test_no_public_function_gives_any_or_a_tensor_where_it_gives_a_global_one(said):
    lines = about(said, "revealing.py")
    first = SET_UP.count("\n") + 1
    got = {int(line.split(":")[1]): plain(line.split('Revealed type is "')[1].rstrip('"')) for line in lines
           if "Revealed type" in line}
    wrong = [f"{text}: {got.get(first + i)}, not {want}" for i, (text, want) in enumerate(REVEALED.items())
             if got.get(first + i) != want]
    assert not wrong and not [line for line in lines if ": error:" in line], "\n".join([*wrong, *lines])


def test_every_name_of_ours_is_in_the_table():
    told = set(re.findall(r"gt\.(\w+)", " ".join(REVEALED) + SET_UP))
    rest = {"GlobalTensor", "GlobalTensorError", "RuleError", "data", "load", "rule", "rules", "sbp", "show",
            "set_grad_reduce_dtype"}                 # classes, modules, and what gives what it was given, or nothing
    rest |= {"dtensor", "from_dtensor", "from_mesh", "materialize", "partition_activations", "to_mesh"}
    rest |= {name for name in gt.FACE if name.endswith("Error")}
    assert set(gt.FACE) <= told | rest, sorted(set(gt.FACE) - told - rest)


def test_programs_pass_mypy(said, tmp_path):
    files = pages(tmp_path)
    wrong = [line for file in files for line in about(said, file.name) if ": error:" in line]
    assert not wrong, "\n".join(wrong)


def test_users_programs_pass_mypy_at_its_strictest(said):
    lines = about(said, "programs.py")
    assert not lines, "\n".join(lines)


def test_users_programs_are_true():
    good([PYTHON, TYPED / "programs.py"], timeout=120)


def test_mistakes_are_found(said):
    text = (TYPED / "mistakes.py").read_text().splitlines()
    lines = about(said, "mistakes.py")
    errors = {int(line.split(":")[1]) for line in lines if ": error:" in line}
    assert errors == {n for n, line in enumerate(text, 1) if line.endswith("# error")}, "\n".join(lines)


@pytest.mark.skipif(generate.VERSION not in (generate.ROOM / "tensor_methods.pyi").read_text()[:200],
                    reason="the stubs are of another torch")
@pytest.mark.usefixtures("real_processes")           # which have not loaded more of torch
def test_the_stubs_are_up_to_date():
    to_do = "python tests/typed/generate.py"
    assert (generate.ROOM / "tensor_methods.pyi").read_text() == generate.tensor_methods(), to_do
    if not torch.version.cuda:
        fresh = subprocess.run([sys.executable, "-c", "import generate; print(generate.torch_names(), end='')"],
                               capture_output=True, text=True, check=True, env=environment(), cwd=TYPED).stdout
        assert (generate.ROOM / "torch_names.pyi").read_text() == fresh, to_do


@pytest.mark.long
def test_pyright_agrees(revealing, tmp_path):
    """Programs pass, mistakes are found, and no type is unknown."""
    programs = [TYPED / "programs.py", *pages(tmp_path)]
    for file in programs + [TYPED / "mistakes.py", revealing]:
        if file.parent != tmp_path:
            (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(
        {"extraPaths": [str(ROOT)], "typeCheckingMode": "basic", "pythonVersion": "3.11"}))
    run = subprocess.run([PYTHON, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", tmp_path],
                         capture_output=True, text=True, timeout=500, cwd=tmp_path, check=False)
    if not run.stdout.startswith("{"):
        pytest.skip(f"pyright needs node, or the net to fetch it: {run.stderr.strip()[-200:]}")
    found = [(Path(d["file"]).name, d["range"]["start"]["line"] + 1, d["severity"], d["message"])
             for d in json.loads(run.stdout)["generalDiagnostics"]]
    text = (TYPED / "mistakes.py").read_text().splitlines()
    expected = {n for n, line in enumerate(text, 1) if line.endswith("# error")}
    optional = r'Import "(accelerate|lightning)[\w.]*" could not be resolved'
    errors = [d for d in found if d[2] == "error" and not re.match(optional, d[3])]
    assert {n for name, n, *_ in errors if name == "mistakes.py"} >= expected
    assert not [d for d in errors if d[0] != "mistakes.py"], errors
    unknown = [d for d in found if d[0] == "revealing.py" and re.search(r'is "(Unknown|Any)"', d[3])]
    assert not unknown, unknown
