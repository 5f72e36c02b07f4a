"""Boxings in torch's profiler, in `gt.metrics` and in logs: what is shown is what `gt.record` records, one for one."""
from __future__ import annotations

import json
import logging
import re
import sys
import time
import types

import pytest
import torch
from harness import PROGRAMS, PYTHON, ROOT, RUN, environment, good, run

import globaltensor as gt

sys.path.insert(0, str(ROOT / "examples"))
import train_gpt

P = gt.placement("cpu", [0, 1])
S, B = gt.sbp.split, gt.sbp.broadcast


# ----------------------------------------------------------------------------------------------- profiler and counts


@pytest.mark.parametrize("native", [
    pytest.param("1", marks=pytest.mark.check), pytest.param("0", marks=pytest.mark.long)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranges_and_counts_are_what_is_recorded(native, ranks):
    launcher = RUN + ["-n", 2] if ranks == 2 else [PYTHON]
    out = good([*launcher, PROGRAMS / "seen.py"], environment(GLOBALTENSOR_NATIVE=native, GLOBALTENSOR_RANKS="2"))
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert len(lines) == ranks
    for line in lines:
        assert not line["wrong"], json.dumps(line["wrong"], indent=1)
        assert line["boxings"] > line["cases"]


def test_ranges_enclose_what_the_op_does(tmp_path):
    x, w = gt.randn(4, 6, placement=P, sbp=S(0)), gt.randn(6, 8, placement=P, sbp=S(0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        x @ w
    boxing, = (event for event in profile.events() if event.name.startswith("boxing for"))
    ops = [event.time_range for event in profile.events() if event.name == "aten::mm"]
    assert any(op.start <= boxing.time_range.start and boxing.time_range.end <= op.end for op in ops)
    assert not boxing.is_async and boxing.cpu_time > 0
    profile.export_chrome_trace(str(tmp_path / "trace.json"))        # which torch writes without escaping names
    names = [row["name"] for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert names.count(boxing.name) == 1


def test_a_boxing_that_is_forbidden_has_no_range():
    x, w = gt.randn(4, 6, placement=P, sbp=S(0)), gt.randn(6, 8, placement=P, sbp=S(0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with pytest.raises(gt.BoxingError), gt.boxing("forbid"):
            x @ w
    assert not any(event.name.startswith("boxing for") for event in profile.events())


# ---------------------------------------------------------------------------------------------------------- metrics


def test_rates_are_of_the_time_since_the_last_call():
    gt.metrics()
    began = time.perf_counter()
    time.sleep(0.05)
    now = gt.metrics(tokens=100, flops=3e9, peak_flops=1e12)
    assert 0.05 <= now["seconds"] <= time.perf_counter() - began + 0.01
    assert now["tokens_per_second"] == 100 / now["seconds"]
    assert now["mfu"] == pytest.approx(3e9 / now["seconds"] / 1e12)
    assert all(type(value) in (int, float) for value in now.values())
    assert now["boxings"] == now["communication_bytes"] == now["communication_seconds"] == now["waiting_seconds"] == 0
    later = gt.metrics()
    assert later["seconds"] < 0.05 and not {"tokens_per_second", "mfu"} & later.keys()


def test_without_a_peak_a_matrix_product_tells_it():
    gt.metrics()
    a, n = torch.ones(512, 512), 4
    for _ in range(n):
        a @ a
    assert 0.01 < gt.metrics(flops=n * 2 * 512 ** 3)["mfu"] < 2


def test_the_first_call_tells_of_memory_only():
    program = ("import globaltensor as gt, torch; first = gt.metrics(tokens=5)\n"
               "x = torch.ones(1 << 24); print(*first)\n"
               "print(gt.metrics()['peak_memory_bytes'] - first['peak_memory_bytes'])")
    first, more = good([PYTHON, "-c", program]).splitlines()
    assert first == "peak_memory_bytes"
    assert int(more) > 60e6


BAD = [
    (dict(tokens=-1), "tokens=-1", "0 or more"),
    (dict(tokens="many"), "tokens='many'", "0 or more"),
    (dict(tokens=True), "tokens=True", "0 or more"),
    (dict(tokens=float("nan")), "tokens=nan", "0 or more"),
    (dict(flops=float("inf")), "flops=inf", "0 or more"),
    (dict(flops=1.0, peak_flops=0), "peak_flops=0", "more than 0"),
    (dict(peak_flops=1e12), "peak_flops=1000000000000.0 without flops", "a share of the peak"),
]


@pytest.mark.parametrize("arguments, what, why", BAD)
def test_numbers_that_are_none_are_refused(arguments, what, why):
    with pytest.raises(gt.ArgumentError) as error:
        gt.metrics(**arguments)
    assert error.value.what.startswith(what) and why in error.value.why and "gt.metrics(" in error.value.fix


WAITING = """
import json, sys, time
import globaltensor as gt
P = gt.placement("cpu", [0, 1])
x = gt.ones(64, 64, placement=P, sbp=gt.sbp.split(0))
x.to_global(sbp=gt.sbp.broadcast)
gt.metrics()
if gt.rank() == 1:
    time.sleep(2)
x.to_global(sbp=gt.sbp.broadcast)
now = gt.metrics(every_rank=True)
print(json.dumps(now))
"""


@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_who_waits_for_whom(native, tmp_path):
    (tmp_path / "program.py").write_text(WAITING)
    out = good([*RUN, "-n", 2, tmp_path / "program.py"], environment(GLOBALTENSOR_NATIVE=native))
    both = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert len(both) == 2
    of_ranks = [{name: now[name] for name in now if "/rank_" in name} for now in both]
    assert of_ranks[0] == of_ranks[1]                # each tells the same of both
    first, second = (of_ranks[0][f"waiting_seconds/rank_{rank}"] for rank in range(2))
    assert first > 0.3 and first > second + 0.2
    assert first <= of_ranks[0]["communication_seconds/rank_0"] + 0.01
    assert all(now["communication_bytes"] == 64 * 64 * 4 // 2 for now in both)


SMALL = ("--dp 2 --tp 2 --steps 12 --layers 2 --hidden 16 --heads 2 --seq 12 --batch 4 --sample 4 "
         "--tensorboard=board").split()


class Board:
    """In the place of tensorboard's SummaryWriter."""

    def __init__(self, folder):
        self.folder, self.scalars, self.closed = folder, {}, False
        Board.made = self

    def add_scalar(self, name, value, step):
        self.scalars.setdefault(name, []).append((step, value))

    def close(self):
        self.closed = True


def test_tensorboard_gets_the_loss_and_the_metrics(monkeypatch):
    monkeypatch.setattr(train_gpt, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Board))
    losses, _ = train_gpt.train(train_gpt.parse(SMALL))
    scalars = Board.made.scalars
    assert (Board.made.folder, Board.made.closed) == ("board", True)
    assert scalars["loss"] == [(10, losses[9]), (12, losses[11])]
    tokens, seconds = ([value for _, value in scalars[name]] for name in ("tokens_per_second", "seconds"))
    assert [rate * time for rate, time in zip(tokens, seconds)] == pytest.approx([10 * 4 * 12, 2 * 4 * 12])
    assert all(value > 0 for name in ("mfu", "communication_bytes", "peak_memory_bytes/rank_0")
               for _, value in scalars[name])


def test_without_tensorboard_the_example_says_what_to_install(monkeypatch):
    monkeypatch.setattr(train_gpt, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        train_gpt.parse(SMALL)
    assert end.value.code == ("train_gpt.py: --tensorboard needs tensorboard, which is not installed: "
                              "pip install 'globaltensor[tensorboard]'")


# ------------------------------------------------------------------------------------------------------------- logs


def shaped(*shape, sbp):
    return gt.randn(*shape, placement=P, sbp=sbp)


DECISIONS = [                                        # of shapes that no other test has, so that they are new
    (lambda: shaped(4, 61, sbp=S(0)) @ shaped(61, 8, sbp=S(0)),
     r'aten\.mm\.default of \[4, 61\], \[61, 8\] at \S*test_seen\.py:\d+: S\(0\), B -> S\(0\) on '
     r'placement\("cpu", \[0, 1\]\), boxed: mat2 S\(0\) -> B'),
    (lambda: shaped(4, 67, sbp=S(0)).exp2_(),
     r'aten\.exp2_\.default of \[4, 67\] at \S*test_seen\.py:\d+: S\(0\) -> S\(0\) on placement\("cpu", \[0, 1\]\)'),
    (lambda: shaped(4, 71, sbp=S(0)).softmax(0),
     r'aten\._softmax\.default of \[4, 71\] at \S*test_seen\.py:\d+: S\(0\) on .*, as other ops \(softmax\)'),
    (lambda: torch._foreach_add([shaped(4, 73, sbp=S(0))] * 6, 1.0),
     r'aten\._foreach_add\.Scalar of \[4, 73\] x6 at \S*test_seen\.py:\d+: S\(0\) x6 -> S\(0\) x6 on .*'),
]


@pytest.mark.parametrize("op, line", DECISIONS)
def test_each_new_decision_is_logged_once(op, line, caplog):
    with caplog.at_level(logging.DEBUG, logger="globaltensor"):
        op(), op()
    found = [record for record in caplog.records if re.fullmatch(line, record.getMessage())]
    assert len(found) == 1, caplog.text
    assert found[0].levelname == "DEBUG" and found[0].name == "globaltensor.dispatch.decision_log"


def test_saves_and_loads_are_logged(caplog, tmp_path):
    module = gt.to_global(torch.nn.Linear(4, 3), P, S(0))
    steps = [
        (lambda: gt.resume({"m": module}, tmp_path / "run"), ["nothing to resume from in {}/run"]),
        (lambda: gt.save({"m": module}, tmp_path / "run"),
         ["saving 2 tensors into {}/run", "saved {}/run/step-00000001"]),
        (lambda: gt.load({"m": module}, tmp_path / "run"), ["loaded 2 tensors from {}/run"]),
        (lambda: gt.resume({"m": module}, tmp_path / "run"),
         ["loaded 2 tensors from {}/run/step-00000001", "resumed from {}/run/step-00000001"]),
        (lambda: gt.save(module.state_dict(), tmp_path / "m.pt"), ["saved {}/m.pt, whole"]),
        (lambda: gt.load(tmp_path / "m.pt"), ["loaded {}/m.pt"]),
        (lambda: gt.save_safetensors(module, tmp_path / "st"), ["saved 2 tensors into {}/st"]),
        (lambda: gt.load_safetensors(module, tmp_path / "st"), ["loaded 2 tensors from {}/st"]),
    ]
    for step, expected in steps:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="globaltensor"):
            step()
        assert [record.getMessage() for record in caplog.records] == [text.format(tmp_path) for text in expected]
        assert {record.levelname for record in caplog.records} == {"INFO"}


STEP = """
import globaltensor as gt
x = gt.ones(4, 4, placement=gt.placement("cpu", [0, 1]), sbp=gt.sbp.split(0))
y = x @ x
"""


@pytest.mark.usefixtures("real_processes")           # torch reads TORCH_LOGS when it is imported
def test_torch_logs_names_this_library():
    code, out, err = run([PYTHON, "-c", STEP], environment(TORCH_LOGS="+globaltensor"))
    assert (code, out) == (0, "") and "aten.mm.default of [4, 4], [4, 4] at " in err
    assert "this process drives all ranks; transport: memory of one process" in err


def test_nothing_is_printed_by_itself():
    assert run([PYTHON, "-c", STEP]) == (0, "", "")


def test_the_start_is_logged(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import logging, sys\nlogging.basicConfig(level=logging.INFO, stream=sys.stdout)\n" + STEP)
    out = good([*RUN, "-n", 2, program])
    for rank in range(2):
        assert f"INFO:globaltensor.runtime.start:rank {rank} of 2 starts\n" in out
        assert f"the world has 2 ranks, this process drives rank {rank}; transport: " in out
    assert "native code\n" in out and "aten.mm" not in out


@pytest.mark.long
def test_a_restart_is_logged(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import logging, sys, os\nlogging.basicConfig(level=logging.INFO, stream=sys.stdout)\n" + STEP +
                       "\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")
    out = good([*RUN, "-n", 2, "--max-restarts", 1, program])
    assert "rank 0 of 2 starts\n" in out and "rank 0 of 2 starts again, restart 1\n" in out


def test_equal_policies_may_be_nested():
    """Where the inner block ends, the outer one goes on; where that ends, none is left."""
    x, w = (gt.from_full(torch.ones(16, 16), gt.placement("cpu", [0, 1]), gt.sbp.split(1)) for _ in range(2))
    with gt.record() as moves:
        x @ w
    with gt.boxing(budget=2 * moves.bytes):
        with gt.boxing(budget=2 * moves.bytes):
            x @ w
        x @ w
        with pytest.raises(gt.BoxingError, match="of its budget"):
            x @ w
    for _ in range(3):
        x @ w
