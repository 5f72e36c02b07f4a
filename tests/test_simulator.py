"""The simulator: exact against an oracle, and its commands against the tables of the papers (tests/data)."""
from __future__ import annotations

import csv
import json
import random
import resource
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from globaltensor.cli import main
from globaltensor.schedules import text
from globaltensor.schedules.check import check_order, check_schedule
from globaltensor.schedules.generators import GENERATORS, generate
from globaltensor.schedules.schedule import Actions, F, ScheduleError
from globaltensor.simulator.cluster import KNOWN, Cluster, ClusterError, Link, as_json, cluster
from globaltensor.simulator.costs import Costs, Hop
from globaltensor.simulator.engine import simulate
from globaltensor.simulator.gpt import GPT
from globaltensor.simulator.memory import model_states
from globaltensor.simulator.training import TrainingPlan, simulate_training

SEED = 21
DATA = Path(__file__).parent / "data"
NAMES = {"i1f1b": "interleaved", "zb1p": "zb-h1", "zbh2": "zb-h2", "zbv": "zb-v", "dualpipev": "dualpipe-v"}
TRILLION = ("--model gpt --layers 128 --hidden 25600 --heads 160 --seq 2048 --vocab 51200 --tp 8 --pp 64 --dp 6 "
            "--micro-batch 1 --global-batch 3072 --cluster dgx-a100")


def rows(name):
    with open(DATA / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def said(capsys, command):
    """Exit code, output and errors of `globaltensor command`."""
    try:
        code = main(command.split())
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


def answer(capsys, command):
    """The JSON object that a command prints."""
    code, out, err = said(capsys, f"{command} --json")
    assert (code, err) == (0, "")
    return json.loads(out)


# ---- the engine


def oracle(schedule, costs):
    """When every action begins, by raising all times until nothing waits for less than it needs."""
    lengths = (costs.forward, costs.backward, costs.inputs, costs.weights)
    begin = {(r, i): Fraction(0) for r, row in enumerate(schedule.actions) for i in range(len(row))}
    place = {}
    for (r, i) in begin:
        a = schedule.actions[r][i]
        place[a.stage, "F" if a.kind == "F" else "W" if a.kind == "W" else "B", a.micro_batch] = r, i

    def ends(r, i):
        a = schedule.actions[r][i]
        return begin[r, i] + lengths["FBIW".index(a.kind)][a.stage]

    while True:
        arrived, free = {}, {}
        for r, row in enumerate(schedule.actions):    # every wire takes the values in the order in which they leave
            for i, a in enumerate(row):
                back = a.kind in "BI"
                to = a.stage + (-1 if back else 1)
                if a.kind == "W" or not 0 <= to < schedule.stages:
                    continue
                there = ends(r, i)
                if schedule.rank_of[to] != r:
                    hop, wire = costs.hops[min(a.stage, to)], (r, schedule.rank_of[to])
                    there = free[wire] = max(there, free.get(wire, 0)) + hop.busy
                    there += hop.latency
                arrived[to, back, a.micro_batch] = there
        before = dict(begin)
        for (r, i) in begin:
            a = schedule.actions[r][i]
            needs = arrived.get((a.stage, a.kind != "F", a.micro_batch), 0) if a.kind != "W" else 0
            begin[r, i] = max(needs, ends(r, i - 1) if i else 0)
        if begin == before:
            return begin


@pytest.mark.parametrize("name", GENERATORS)
def test_times_are_those_of_the_oracle(name):
    chance = random.Random(SEED)
    for p, m in ((1, 2), (2, 3), (3, 5), (4, 6), (3, 1)):
        schedule = generate(name, p, m)
        some = [tuple(Fraction(chance.randint(0, 9), chance.randint(1, 5)) for _ in range(schedule.stages))
                for _ in range(3)]
        hops = tuple(Hop(Fraction(chance.randint(0, 3), 2), Fraction(chance.randint(0, 5), 3))
                     for _ in range(schedule.stages - 1))
        costs = Costs(*some, hops, Fraction(1))
        run, begin = simulate(schedule, costs, record=True), oracle(schedule, costs)
        found = {(r, i): start for r, starts in enumerate(run.starts) for i, start in enumerate(starts)}
        assert found == begin, f"seed {SEED}: {name} p={p} m={m}"
        plain = simulate(schedule, costs)
        assert (plain.span, plain.makespan, plain.starts) == (run.span, run.makespan, [])


def test_fractions_are_exact():
    run = simulate(generate("1f1b", 3, 4), Costs.exact(["1/3", "0.1", "1/7"], 3))
    assert run.makespan == (4 + 2) * (Fraction(1, 3) + Fraction(1, 10) + Fraction(1, 7))
    assert run.bubble_rate == Fraction(1, 3)


def test_a_wire_takes_one_value_at_a_time():
    costs = Costs((1, 1), (1, 1), (0, 0), (Hop(latency=2, busy=5),), 1)
    run = simulate(generate("gpipe", 2, 3), costs, record=True)
    assert run.starts[1][:3] == [8, 13, 18]           # made at 1, 2, 3; the wire is free for them at 1, 6, 11


def test_spans_and_makespan_differ_where_ranks_begin_and_end_in_turn():
    run = simulate(generate("zb-h2", 4, 8), Costs.exact([1, 1, 1, 0], 4))
    assert (run.makespan, run.spans, run.bubble_rate) == (27, [24] * 4, 0)


def test_what_never_begins():
    crossed = text.parse_schedule("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")
    with pytest.raises(ScheduleError, match="rank 0, action 1: 0B0 .* never begins"):
        simulate(crossed, Costs.exact([1, 1, 1], 2))


@pytest.mark.parametrize("lines, what", [
    ("0F0 0B0\n1B0 1F0", "rank 1, action 0: 1B0 .* comes before 1F0"), ("0B0 0F0\n1F0 1B0", "0B0 .* comes before 0F0"),
    ("0F0 0F1 0B0 0B1\n1F0 1B1 1F1 1B0", "rank 1, action 1: 1B1 .* comes before 1F1"),
    ("0F0 0W0 0I0", "0W0 .* comes before 0I0"), ("0I0 0F0 0W0", "0I0 .* comes before 0F0"),
    ("0F0 0W0", "0W0 .* comes before 0I0")])
def test_a_backward_before_its_forward_is_refused(lines, what):
    """Also by check_schedule, in the same words where nothing else is missing."""
    schedule = text.parse_schedule(lines)
    costs = Costs.exact([1, 1, 1], schedule.stages)
    for check in (lambda: simulate(schedule, costs), lambda: check_schedule(schedule)):
        with pytest.raises(ScheduleError, match=what):
            check()


def test_orders_at_random_are_judged_as_the_checker_judges_them():
    chance = random.Random(SEED)
    for _ in range(200):
        schedule = generate(chance.choice(["1f1b", "zb-h1", "interleaved"]), 2, 4)
        rows = [list(row) for row in schedule.actions]
        for row in rows:
            a, b = chance.randrange(len(row)), chance.randrange(len(row))
            row[a], row[b] = row[b], row[a]
        mixed = replace(schedule, actions=tuple(Actions.of(row, schedule.stages) for row in rows))
        told = []
        for check in (check_order, check_schedule):
            try:
                check(mixed)
                told.append("")
            except ScheduleError as error:
                told.append(error.what if "comes before" in error.what else "")
        assert told[0] == told[1], f"seed {SEED}: {rows}"


def test_a_part_of_a_schedule_is_simulated():
    forward = generate("1f1b", 3, 4).only([F])
    assert simulate(forward, Costs.exact([1, 1, 1], 3)).makespan == 3 + 4 - 1


def test_sends_and_receives_change_no_time():
    from globaltensor.schedules.communication import communicate
    schedule = generate("zb-v", 3, 7)
    costs = Costs.exact([2, 3, 1, 1], 6, 2)
    assert simulate(communicate(schedule), costs).spans == simulate(schedule, costs).spans


@pytest.mark.long
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])                             # that of zb-v are the most actions
def test_3072_ranks_and_1000_micro_batches(name):
    command = f"simulate --schedule {name} --stages 3072 --micro-batches 1000 --times 18.522,18.086,9.337,0.601 --json"
    program = ("import sys\nfrom globaltensor.cli import main\nmain(sys.argv[1:])\n"
               "print(open('/proc/self/status').read(), file=sys.stderr)")         # which knows nothing of its parent
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run([sys.executable, "-c", program, *command.split()], check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(out.stdout)["ranks"] == 3072
    most, = (int(line.split()[1]) for line in out.stderr.splitlines() if line.startswith("VmHWM:"))
    assert after.ru_utime - before.ru_utime < 60 and most < 4e6     # seconds on one core, KiB


def test_schedules_are_listed_and_a_wrong_name_is_the_first_error(capsys):
    code, out, _ = said(capsys, "simulate --list")
    assert code == 0 and out.split() == list(GENERATORS)
    code, out, err = said(capsys, "simulate --schedule zbh1")
    assert (code, out) == (2, "") and "there is no schedule 'zbh1'" in err and "try: zb-h1" in err


# ---- globaltensor simulate, with times


def test_the_golden_table_by_the_command(capsys):
    table = rows("golden_schedules_unit_costs")
    assert len(table) == 88
    for row in table:
        name = NAMES.get(row["schedule"], row["schedule"])
        found = answer(capsys, f"simulate --schedule {name} --stages {row['p']} --micro-batches {row['m']} "
                               f"--chunks {row['v']} --times 1,1,1,0")
        assert found["makespan"] == float(row["makespan"]) and found["span"] == float(row["max_rank_span"]), row
        assert round(found["bubble_rate"], 6) == float(row["bubble_frac_rank_span"]), row
        assert found["peak_activations"] == [float(n) for n in row["peak_act_per_rank_MB"].split(";")], row


@pytest.mark.parametrize("name, rate", [("1f1b", 0.2431), ("zb-h1", 0.1585), ("zb-h2", 0.1083)])
def test_bubble_rates_of_the_zero_bubble_paper(capsys, name, rate):
    """arXiv:2401.10241: 1.5 billion parameters on 8 ranks, 24 micro-batches, with the times that they measured."""
    found = answer(capsys, f"simulate --schedule {name} --stages 8 --micro-batches 24 "
                           "--times 18.522,18.086,9.337,0.601")
    assert round(found["bubble_rate"], 4) == rate
    work = 24 * (18.522 + 18.086 + 9.337)
    assert found["work"] == pytest.approx(work) and found["step_time"] == found["makespan"]
    assert found["bubble_rate"] == pytest.approx((found["span"] - work) / found["span"])


def test_what_the_command_prints(capsys):
    found = answer(capsys, "simulate --schedule zb-v --stages 2 --micro-batches 3 --times 2,2,2 --text")
    assert found == {
        "schedule": "zb-v", "ranks": 2, "stages": 4, "micro_batches": 3, "bubble_rate": 0.0, "span": 18,
        "makespan": 19, "work": 18, "spans": [18, 18], "step_time": 19, "peak_activations": [2, 2],
        "links": [{"from": 0, "to": 1, "transfers": 6}, {"from": 1, "to": 0, "transfers": 6}],
        "timetable": ["rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2 ..",
                      "rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2"]}
    found = answer(capsys, "simulate --schedule zb-h2 --stages 2 --micro-batches 4 --times 1,1,1 --weight-share 1/4")
    assert found["peak_activations"] == [3, 1.5]      # (2p-2r-1) + 2r/4
    code, out, _ = said(capsys, "simulate --schedule 1f1b --stages 2 --micro-batches 2 --times 1,1,1 --text")
    assert code == 0 and out.startswith("rank 0  F0 F1") and "bubble rate        0.3333\n" in out


def test_a_schedule_of_ones_own(capsys, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n")
    found = answer(capsys, f"simulate --schedule {file} --times 1,1,1,0")
    assert (found["schedule"], found["span"], found["peak_activations"]) == ("mine", 9, [2, 1])
    file.write_text("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1B1 1F1\n")
    code, out, err = said(capsys, f"simulate --schedule {file} --times 1,1,1,0")
    assert (code, out) == (2, "")
    assert err == (f"globaltensor: rank 1, action 2: 1B1 (line 2 of {file}) comes before 1F1\n"
                   f"  where: {file}:2\n  why: it needs the result of 1F1\n  try: 1F1 before it\n")


def test_pictures_and_traces(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "step.png", tmp_path / "step.json"
    answer(capsys, f"simulate --schedule zb-h2 --stages 3 --micro-batches 6 --times 1,1,1 --plot {picture} "
                   f"--trace {trace}")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 3 * 3 * 6
    for rank in range(3):                             # what is kept over time: never more than the peak, nothing left
        curve = [e["args"]["activations"] for e in events if e["ph"] == "C" and e["tid"] == rank]
        assert max(curve) == 5 and curve[-1] == 0


def test_memory_over_time_in_bytes(capsys, tmp_path):
    trace = tmp_path / "step.json"
    found = answer(capsys, "simulate --model gpt --layers 4 --hidden 64 --heads 4 --seq 32 --pp 2 --global-batch 8 "
                           f"--recompute none --trace {trace}")
    events = json.loads(trace.read_text())["traceEvents"]
    for rank in range(2):
        curve = [e["args"]["memory in GB"] * 1e9 for e in events if e["ph"] == "C" and e["tid"] == rank]
        assert max(curve) == pytest.approx(found["memory"]["per_rank"][rank])
        assert curve[-1] == pytest.approx(found["memory"]["model_states"][rank])


GPT_TINY = "--model gpt --layers 4 --hidden 64 --heads 4 --seq 32"


@pytest.mark.parametrize("command, text", [
    ("simulate", "what do the actions take?\n  try: --times 1,1,1,0, or --model"),
    ("simulate --times 1,1,1", "which --schedule?"),
    ("simulate --times 1,1,1 --schedule 1f1b --stages 2", "which --micro-batches?"),
    ("simulate --times 1,1 --schedule 1f1b --stages 2 --micro-batches 2", "2 times\n  why: they are TF,TB,TW,Tcomm"),
    ("simulate --times 1,1,x --schedule 1f1b --stages 2 --micro-batches 2", "'x' is not a time"),
    ("simulate --times 1,1,-1 --schedule 1f1b --stages 2 --micro-batches 2", "'-1' is not a time"),
    ("simulate --times 1,1,inf --schedule 1f1b --stages 2 --micro-batches 2", "'inf' is not a time"),
    ("simulate --times 1,1,1 --schedule zbh1 --stages 2 --micro-batches 2", "try: zb-h1 or zb-h2 or zb-v"),
    ("simulate --times 1,1,1 --schedule gone.txt", "the schedule gone.txt could not be read"),
    ("simulate --times 1,1,1 --schedule 1f1b --stages 0 --micro-batches 2", "'0' is not a whole number of at least 1"),
    ("simulate --times 1,1,1 --schedule 1f1b --stages 2 --micro-batches 2 --weight-share x",
     "--weight-share x is not a number"),
    ("simulate --times 1,1,1 --schedule 1f1b --stages 100 --micro-batches 2000 --text", "400,000 actions are too many"),
    ("simulate --model gpt --layers 4", "--model gpt needs --hidden"),
    (f"simulate {GPT_TINY}", "which --global-batch?"),
    (f"simulate {GPT_TINY} --pp 8 --global-batch 8", "4 layers in 8 stages\n  why: a stage has at least one layer\n"
                                                     "  try: --pp 4"),
    (f"simulate {GPT_TINY} --pp 2 --dp 3 --global-batch 8", "try: --global-batch 6"),
    (f"simulate {GPT_TINY} --pp 2 --global-batch 8 --cluster dgx", "try: dgx-h100 or dgx-a100"),
    ("simulate --model gpt --layers 4 --hidden 65 --heads 4 --seq 32 --global-batch 8", "hidden 65 over 4 heads"),
    (f"simulate {GPT_TINY} --tp 3 --global-batch 8", "try: --tp 2"),
    (f"memory {GPT_TINY} --tp 3", "tp 3 with 4 heads"), ("memory", "how large is the model?"),
    ("memory --params many", "--params many is not a number of parameters"),
    ("memory --params 1e9 --bytes 2,2", "'2,2' is not three numbers of bytes"),
    ("memory --params 1e9 --zero 4", "there is no '4'; choose from 0, 1, 2, 3"),
    ("memory --params 1e9 --dp 0", "'0' is not a whole number of at least 1"),
])
def test_what_cannot_be_simulated_is_said(capsys, command, text):
    code, out, err = said(capsys, command)
    assert (code, out) == (2, "") and text in err and "Traceback" not in err


# ---- globaltensor memory, and the formulas of a GPT


def test_the_zero_table_by_the_command(capsys):
    table = rows("zero_table1")
    assert len(table) == 54
    for row in table:
        stage = {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}[row["stage"]]
        found = answer(capsys, f"memory --params {row['params']} --zero {stage} --dp {row['dp_degree']}")
        gb = found["model_states_gb"]
        assert round(gb, 4) == float(row["gb_formula_K12_1e9"]), row
        last_digit = 10.0 ** -len(row["gb_per_device_paper"].partition(".")[2])
        assert abs(gb - float(row["gb_per_device_paper"])) < last_digit, row       # some are rounded, some cut off
        assert found["model_states"]["total"] == found["total"] == gb * 1e9


def test_memory_in_words(capsys):
    code, out, _ = said(capsys, "memory --params 7.5B --zero 2 --dp 64")
    assert code == 0 and [line.split()[-2:] for line in out.splitlines()[1:]] == [
        ["15", "GB"], ["234", "MB"], ["1.41", "GB"], ["16.6", "GB"]]


@pytest.mark.parametrize("bytes_each, plain, cut", [((2, 2, 16), 20, (4, 16)), ((2, 4, 12), 18, (6, 12)),
                                                    ((4, 4, 8), 16, (8, 8))])
def test_bytes_of_other_precisions(bytes_each, plain, cut):
    """Megatron-LM's distributed optimizer: so many bytes a parameter without it, a + b / d with it."""
    assert model_states(1, 0, 8, bytes_each).total == plain
    assert model_states(1, 1, 8, bytes_each).total == cut[0] + Fraction(cut[1], 8)


def test_parameters_and_operations_of_the_sc21_table(capsys):
    for row in rows("megatron_sc21_table1"):
        l, h, a, batch = (int(row[k]) for k in ("layers", "hidden", "heads", "global_batch"))
        s, vocabulary = 2048, 51200
        found = answer(capsys, f"memory --model gpt --layers {l} --hidden {h} --heads {a} --seq {s} "
                               f"--vocab {vocabulary}")
        formula = 12 * l * h ** 2 * (1 + Fraction(13, 12 * h) + Fraction(vocabulary + s, 12 * l * h))
        assert found["parameters"] == formula
        assert round(found["parameters"] / 1e9, 2) == float(row["params_formula_billion_derived"])
        assert round(found["parameters"] / 1e9, 1) == pytest.approx(float(row["params_billion"]), abs=0.11)
        operations = 96 * batch * s * l * h ** 2 * (1 + Fraction(s, 6 * h) + Fraction(vocabulary, 16 * l * h))
        assert GPT(l, h, a, s, vocabulary).operations(batch) == operations
        assert round(float(operations) / 1e15, 1) == pytest.approx(float(row["flops_eq3_per_iter_PF_derived"]), abs=0.1)


OPTIONS = {"no parallelism": "", "tensor parallel (baseline)": "--tp 8", "tensor+sequence parallel": "--tp 8 --sp",
           "tensor parallel + selective recompute": "--tp 8 --recompute selective",
           "tensor+sequence + selective recompute": "--tp 8 --sp --recompute selective",
           "full recompute": "--tp 8 --sp --recompute full"}


def test_activations_of_the_korthikanti_table(capsys):
    table = rows("korthikanti_table2_activation_formulas")
    assert len(table) == 6
    s, b, h, a, layers = 2048, 4, 6144, 64, 48
    for row in table:
        options = OPTIONS[row["configuration"]]
        formula = eval(row["bytes_per_layer"], {"s": s, "b": b, "h": Fraction(h), "a": a, "t": Fraction(8)})
        found = answer(capsys, f"memory --model gpt --layers {layers} --hidden {h} --heads {a} --seq {s} "
                               f"--micro-batch {b} {options}")
        assert found["activations_per_layer"] == formula, row
        assert found["activations"] == layers * formula
        assert found["total"] == found["activations"] + found["model_states"]["total"]


# ---- globaltensor simulate, with a model


def test_a_trillion_parameters_by_the_command(capsys):
    found = answer(capsys, f"simulate {TRILLION}")
    assert found["devices"] == 3072 and found["micro_batches"] == 512 and found["memory"]["fits"]
    assert found["parameters"] == 1_008_038_707_200
    assert found["tokens_per_second"] == pytest.approx(3072 * 2048 / found["step_time"])
    assert found["bubble_rate"] > 63 / (512 + 63)     # more than the formula: the last stage has the output layer
    transfer, moved = found["traffic"]["between_stages"], 2 * 2048 * 25600
    assert transfer["bytes"] == moved                 # an eighth from the stage before, the rest from its own host
    assert found["links"][0] == {"from": 0, "to": 1, "transfers": 512, "bytes": 512 * moved // 8}
    reductions = 2 * 512 * 6                          # layers, micro-batches; forward, again, backward, 2 each
    assert found["traffic"]["tensor_parallel"]["bytes"] == reductions * 2 * 7 * moved // 8


def test_ten_plans_come_out_as_measured():
    """With one number fitted (the share of its peak that an A100 reaches), all ten rows of the SC'21 table."""
    for row in rows("megatron_sc21_table1"):
        chunks = int(row["virtual_chunks_v"])
        plan = TrainingPlan(int(row["micro_batch"]), int(row["global_batch"]), int(row["dp_derived"]), int(row["tp"]),
                    int(row["pp"]), "interleaved" if chunks > 1 else "1f1b", chunks if chunks > 1 else None)
        gpt = GPT(int(row["layers"]), int(row["hidden"]), int(row["heads"]), 2048)
        step = simulate_training(gpt, plan, KNOWN["dgx-a100"])
        measured = float(row["tflops_per_gpu"])
        tflops = float(step.operations) / step.seconds / plan.devices / 1e12
        assert tflops == pytest.approx(measured, rel=0.08), f"{row['params_billion']} billion: {tflops:.0f} {measured}"
        assert max(a + b for a, b in zip(step.states, step.activations)) < 80e9      # it did fit


def test_what_zero_moves_and_keeps():
    gpt, found = GPT(8, 512, 8, 128, 1024), {}
    for zero in range(3):
        step = simulate_training(gpt, TrainingPlan(2, 64, 4, 1, 2, zero=zero), KNOWN["dgx-a100"])
        parameters = 4 * gpt.parameters_per_layer + gpt.embeddings
        found[zero] = step.data.bytes
        states = model_states(parameters, zero, 4)
        assert step.states[0] == states.parameters + 2 * parameters + states.optimizer, "unreduced until the end"
        assert step.data.bytes == 2 * 3 * 2 * parameters // 4
    assert len(set(found.values())) == 1              # a reduction is a reduce-scatter and a gather


@pytest.mark.parametrize("tp, dp", [(1, 64), (4, 16), (8, 8), (2, 4)])
def test_gradients_over_hosts_move_what_a_ring_does(tp, dp):
    """Within hosts, between them, and within them again: together the 2 (n - 1) / n of one all-reduction."""
    gpt = GPT(8, 512, 8, 128, 1024)
    step = simulate_training(gpt, TrainingPlan(2, 2 * dp, dp, tp), KNOWN["dgx-a100"])
    parameters = gpt.parameters_per_layer // tp * gpt.layers + gpt.embeddings // tp
    assert step.data.bytes == pytest.approx(2 * (dp - 1) / dp * 2 * parameters, rel=1e-3)


def test_a_reduction_takes_rounds_where_the_transport_does():
    """log2(n) of them on GPUs, one where ranks read each other's memory; a stage hands over in one."""
    far = Link(1.0, 1e30)
    slow = Cluster("slow", 8, 1e30, 1.0, 1e30, 1e30, far, far)
    for ranks, rounds in ((2, 1), (4, 2), (8, 3)):
        for transport, times in (("nccl", rounds), ("shared memory", 1)):
            plan = TrainingPlan(1, 1, 1, ranks, 2)
            step = simulate_training(GPT(2, 64, 8, 8), plan, replace(slow, transport=transport))
            assert step.tensor.latency == 6 * times, (ranks, transport)
            assert step.stage.latency == 1


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zb-v"])
def test_what_zero_3_moves_and_keeps(capsys, name):
    d, p, m, l, h, s, vocabulary = 4, 2, 8, 8, 512, 128, 1024
    command = (f"simulate --model gpt --layers {l} --hidden {h} --heads 8 --seq {s} --vocab {vocabulary} --dp {d} "
               f"--pp {p} --micro-batch 2 --global-batch {2 * d * m} --schedule {name} --zero")
    two, three = (answer(capsys, f"{command} {zero}") for zero in (2, 3))
    layer, embeddings, output = 12 * h * h + 13 * h, (vocabulary + s) * h, vocabulary * h
    own = l // p * layer + embeddings + (output if name == "zb-v" else 0)           # rank 0; a V ends there
    gather = reduce_scatter = 2 * own * (d - 1) // d
    assert three["traffic"]["data_parallel"]["bytes"] == m * gather + m * gather + reduce_scatter    # F, backward, end
    assert two["traffic"]["data_parallel"]["bytes"] == reduce_scatter + gather
    kept = {zero: found["memory"]["model_states"][0] for zero, found in ((2, two), (3, three))}
    assert kept == {2: 4 * own + 12 * own // d, 3: 14 * own // d + 2 * own + 2 * (2 * layer)}    # one layer ahead


def test_zero_3_gathers_a_layer_while_another_is_computed():
    d, m, bandwidth, gpt = 4, 6, 1e9, GPT(4, 512, 8, 128, 1024)
    link = Link(latency=0.0, bandwidth=bandwidth)
    slow = Cluster("slow", 8, 1e11, 1.0, 80e9, 1e30, link, link)      # it takes time to compute and to send, else none
    embedding, layer, output = (2 * n * (d - 1) / d / bandwidth for n in (
        gpt.embeddings, gpt.parameters_per_layer, gpt.vocabulary * gpt.hidden))
    logits = float(gpt.logits_forward(2)) / 1e11
    assert float(gpt.layer_forward(2)[0]) / 1e11 > layer > logits     # layers hide a gather, the output does not
    for p, forward, inputs in ((1, [embedding + layer], [layer - logits]),         # the output has the embedding's
                               (2, [embedding + layer, layer], [layer, output + layer - logits])):
        two, three = (simulate_training(gpt, TrainingPlan(2, 2 * d * m, d, 1, p, "1f1b", zero=zero), slow)
                      for zero in (2, 3))
        more = [[a - b for a, b in zip(*pair)] for pair in zip(
            *((of.run.costs.forward, of.run.costs.inputs, of.run.costs.weights) for of in (three, two)))]
        assert more == [pytest.approx(seconds, rel=1e-9) for seconds in (forward, inputs, [0.0] * p)]


def test_zero_over_one_rank_is_nothing():
    gpt = GPT(8, 512, 8, 128, 1024)
    plain, three = (simulate_training(gpt, TrainingPlan(2, 16, 1, 2, 2, zero=zero), KNOWN["dgx-a100"])
                    for zero in (0, 3))
    assert (three.seconds, three.states, three.data) == (plain.seconds, plain.states, plain.data)


def test_sequence_parallel_moves_the_same_and_keeps_less():
    gpt = GPT(8, 4096, 32, 2048)
    plans = (TrainingPlan(2, 16, 1, 8, 2, recompute="none", sequence_parallel=sp) for sp in (False, True))
    plain, sequence = (simulate_training(gpt, plan, KNOWN["dgx-a100"]) for plan in plans)
    assert sequence.tensor.bytes == plain.tensor.bytes
    assert sequence.activations[0] < plain.activations[0]
    assert sequence.stage.bytes == sequence.stage.crossing == plain.stage.crossing == plain.stage.bytes // 8


def test_a_cluster_of_ones_own(capsys, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(as_json(KNOWN["dgx-a100"]))
    assert cluster(str(file)) == KNOWN["dgx-a100"]
    described = json.loads(file.read_text()) | {"name": "small", "hosts": 1, "memory": 1e6}
    file.write_text(json.dumps(described))
    found = answer(capsys, f"simulate {GPT_TINY} --pp 2 --global-batch 8 --cluster {file}")
    assert found["cluster"] == "small" and not found["memory"]["fits"]
    code, _, err = said(capsys, f"simulate {GPT_TINY} --pp 4 --dp 4 --global-batch 16 --cluster {file}")
    assert code == 2 and "16 devices of small\n  why: it has 1 hosts with 8 each\n  try: --devices 8, or a" in err


@pytest.mark.parametrize("written, text", [
    ("{", "could not be read"),
    ("[]", "describes no cluster"),
    ("{}", "lacks 'devices_per_host'"),
    ('{"flop": 1}', "a cluster has no 'flop'"),
    ('{"flops": "fast"}', "flops is 'fast'"),
    ('{"flops": -1}', "flops is -1"),
    ('{"flops": 0}', "flops is 0"),
    ('{"devices_per_host": 0}', "devices_per_host is 0"),
    ('{"local": 5}', "local.latency is None"),
    ('{"local": {"latency": 0, "bandwidth": 0}}', "local.bandwidth is 0"),
    ('{"memory": true}', "memory is True"),
])
def test_a_cluster_that_is_none(tmp_path, written, text):
    file = tmp_path / "mine.json"
    file.write_text(written)
    with pytest.raises(ClusterError, match=text):
        cluster(str(file))


def test_a_described_cluster_leaves_this_world_alone():
    import globaltensor as gt
    from globaltensor.errors import PlacementError

    simulate_training(GPT(4, 64, 4, 32), TrainingPlan(1, 64, 8, 2, 4), KNOWN["dgx-h100"])
    with pytest.raises(PlacementError, match="outside the world"):
        gt.placement("cpu", [10_000])
