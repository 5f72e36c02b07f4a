"""Pipeline schedules: every generator against its formulas, and what is not legal against an error that names it."""
from __future__ import annotations

import json
import random
import re
import time
from collections import defaultdict
from fractions import Fraction

import pytest

from globaltensor.schedules import text, timetable
from globaltensor.schedules.check import activation_history, check_schedule, least_capacity, peak_activations
from globaltensor.schedules.communication import communicate, communicates
from globaltensor.schedules.early_send import send_gradients_early
from globaltensor.schedules.generators import GENERATORS, generate
from globaltensor.schedules.schedule import COMPUTE, Action, F, Schedule, ScheduleError
from globaltensor.simulator.costs import Costs
from globaltensor.simulator.engine import simulate

SEED = 20
CASES = {name: [(p, m, v) for p in range(1, 9) for m in range(1, 4 * p + 1) for v in range(1, 5) if own in (None, v)]
         for name, (_, own) in GENERATORS.items()}


def least_extra(p, m, v, whole):
    """With whole backwards and v chunks in a loop, no schedule takes less. The last stage does m times its part
    between the first micro-batch's way there and the last one's way back, each through v p - 1 stages; and the last
    rank works m T between its first stage's begin, p - 1 stages from the start, and its end, p - 1 from the end."""
    return max(Fraction(v * p - 1 + m, v) * whole - m * whole, (p - 1) * whole / v)


def expected(name, p, m, v, tf, tb, tw):
    """The extra time of a step beyond m T, or None where there is no formula for it."""
    whole, weights_short = tf + tb + tw, tw <= min(tf, tb)
    if name in ("gpipe", "1f1b"):
        return (p - 1) * whole
    if name in ("interleaved", "bfs"):
        return least_extra(p, m, v, whole)
    if name == "zb-h1" and m >= p and weights_short:
        return (p - 1) * (tf + tb - tw) / v
    if name == "zb-h1" and v == 1 and tf == tb == tw:
        return max(p, 2 * p - m) * tf - tf            # rank 0 has m forwards to do before the first gradient is back
    if name == "zb-h2" and m >= 2 * p - 1 and weights_short:
        return (p - 1) * (tf + tb - 2 * tw)
    if name in ("zb-h2", "zb-v") and tf == tb == tw:
        return max(0, 2 * p - 1 - m) * tf
    if name == "dualpipe-v" and m >= 2 * p and tf == tb == tw:
        return Fraction(p - 1, 2) * tf
    return None


def peaks(name, p, m, v, r, share):
    """Activations kept on rank r, or None where there is no formula."""
    if name in ("gpipe", "bfs"):
        return m
    if name == "1f1b" or name == "interleaved" and v == 1:
        return min(m, p - r)
    if name == "interleaved" and m % p == 0:
        return min(m, Fraction((v - 1) * p + 2 * (p - 1 - r) + 1, v))
    if name == "zb-h1" and share == 1 and (m % p == 0 or v == 1):
        return min(m, p)
    if name == "zb-h2" and m >= 2 * p - 1:
        return (2 * p - 2 * r - 1) + 2 * r * share
    if name == "zb-v" and share == 1 and m >= 2 * p - 1:
        return p
    if name == "dualpipe-v" and share == 1 and m >= 2 * p:
        return p + Fraction(1, 2)
    return None


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_is_legal_and_meets_its_formulas_exactly(name):
    chance = random.Random(SEED)
    met = 0
    for p, m, v in CASES[name]:
        schedule = generate(name, p, m, v)
        check_schedule(schedule)
        tf, tb = (Fraction(chance.randint(1, 9), chance.randint(1, 4)) for _ in range(2))
        short = min(tf, tb) * Fraction(chance.randint(0, 4), 4)
        for times in [(Fraction(1),) * 3, (tf, tb, short), (tf, tb, Fraction(chance.randint(1, 9)))]:
            run = simulate(schedule, Costs.exact(times, schedule.stages, v))
            extra, formula = run.span - m * sum(times), expected(name, p, m, v, *times)
            assert extra >= 0 and set(run.work) == {m * sum(times)}
            if formula is not None:
                assert extra == formula, f"seed {SEED}: {name} p={p} m={m} v={v} times {times}"
                met += 1
        for share in (Fraction(1), Fraction(1, 3)):
            for r, peak in enumerate(peak_activations(schedule, share)):
                formula = peaks(name, p, m, v, r, share)
                assert formula is None or peak == formula, (name, p, m, v, r, share)
                assert peak <= m
    assert met >= 80


def test_the_formulas_of_the_papers_as_they_print_them():
    p, m, v = 4, 8, 2
    assert peak_activations(generate("interleaved", p, m, v))[0] == p * (1 + Fraction(p - 1, p * v))
    run = simulate(generate("interleaved", p, m, v), Costs.exact([1, 1, 1], 8, v))
    assert run.span - m * 3 == Fraction((p - 1) * 3, v)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", GENERATORS)
def test_gradients_handed_on_early_take_weights_out_of_the_last_chain(name):
    def order(row):
        return [a._replace(kind="B") if a.kind == "I" else a for a in row if a.kind != "W"]

    for p, m, v in CASES[name]:
        whole = generate(name, p, m, v)
        halves = send_gradients_early(whole)
        check_schedule(halves)
        assert list(map(order, halves.actions)) == list(map(order, whole.actions))
        at_first, then = (simulate(s, Costs.exact((1, 1, 1), s.stages)).makespan for s in (whole, halves))
        assert then <= at_first, (p, m, v)
        if name == "1f1b" or (name, v) == ("interleaved", 1):
            assert m < p or at_first - then == p - 1, (p, m)      # (p-1) TW
        elif m >= 2 * p:
            assert halves == whole, (p, m, v)         # nobody waits in the end, or nothing is whole


@pytest.mark.parametrize("p, m, v", [(4, 2, 1), (4, 3, 3), (8, 5, 2), (3, 1, 4)])
def test_fewer_micro_batches_than_ranks_cost_zb_h1_no_more_than_interleaved(p, m, v):
    spans = [simulate(generate(name, p, m, v), Costs.exact(["7/3", 2, 1], p * v, v)).span
             for name in ("zb-h1", "interleaved")]
    assert spans[0] <= spans[1]


def test_a_number_of_micro_batches_that_is_no_multiple_keeps_little_more():
    for m in range(4, 40):
        largest = -(-m // (m // 4))                   # m // p groups, as even as can be
        assert peak_activations(generate("interleaved", 4, m, 2))[0] == min(m, Fraction(largest + 2 * 3 + 1, 2)), m


# ---- sends and receives


def channels(program: Schedule):
    """For each ordered pair of ranks, the values sent and the values received, in order."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(program.actions):
        for a in row:
            step = 1 if a.kind in ("SEND_F", "RECV_B") else -1
            if a.kind.startswith("SEND"):
                sent[rank, program.rank_of[a.stage + step]].append((a.kind[-1], a.stage + step, a.micro_batch))
            elif a.kind.startswith("RECV"):
                received[program.rank_of[a.stage + step], rank].append((a.kind[-1], a.stage, a.micro_batch))
    return dict(sent), dict(received)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("p, m", [(1, 3), (2, 5), (4, 3), (4, 8), (5, 12)])
def test_receives_are_the_sends_in_order(name, p, m):
    schedule = generate(name, p, m)
    program = communicate(schedule)
    sent, received = channels(program)
    assert sent == received
    between = sum(a != b for a, b in zip(schedule.rank_of, schedule.rank_of[1:]))
    assert sum(map(len, sent.values())) == 2 * m * between
    assert program.only(COMPUTE).actions == schedule.actions
    check_schedule(program)                                    # what it is told in full, it checks in full
    assert communicates(program) == (p > 1) and not communicates(schedule)


def test_on_a_v_receiving_in_the_order_of_use_would_swap_values():
    program = communicate(generate("zb-v", 4, 8))
    used = defaultdict(list)
    for rank, row in enumerate(program.actions):
        for a in row:
            before = a.stage - 1 if a.kind == "F" else a.stage + 1
            if a.kind in "FBI" and 0 <= before < program.stages and program.rank_of[before] != rank:
                used[program.rank_of[before], rank].append(("F" if a.kind == "F" else "B", a.stage, a.micro_batch))
    sent, _ = channels(program)
    swapped = [pair for pair in sent if sent[pair] != used[pair]]
    assert swapped and all(sorted(sent[pair]) == sorted(used[pair]) for pair in swapped)
    rows = [list(row) for row in program.actions]     # and the check sees it
    rank = swapped[0][1]
    order = iter([Action(stage, f"RECV_{kind}", mb) for kind, stage, mb in used[swapped[0]]])
    mine = {Action(stage, f"RECV_{kind}", mb) for kind, stage, mb in used[swapped[0]]}
    rows[rank] = [next(order) if a in mine else a for a in rows[rank]]
    with pytest.raises(ScheduleError, match="would receive the wrong value|comes before"):
        check_schedule(text.parse_schedule("\n".join(" ".join(map(str, row)) for row in rows)))


def test_channel_capacity():
    assert {name: least_capacity(generate(name, 4, 8)) for name in GENERATORS} == {
        "gpipe": 0, "1f1b": 1, "interleaved": 1, "bfs": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe-v": 2}
    with pytest.raises(ScheduleError) as error:
        check_schedule(generate("1f1b", 2, 3), capacity=0)
    assert error.value.what == ("rank 0, action 1: 0F1 deadlocks with room for 0 values per channel")
    assert error.value.why == ("rank 0 waits at 0SEND_F1 for a receive by rank 1; "
                               "rank 1 waits at 1SEND_B0 for a receive by rank 0")


# ---- what is wrong with a schedule

GOOD = ["rank 0: 0F0 0F1 0I0 0W0 0B1", "rank 1: 1F0 1B0 1F1 1I1 1W1"]


@pytest.mark.parametrize("zero, one, what, line", [
    ("0F0 0F1 0I0 0W0", None, "rank 0 never does 0B1", None),
    ("0F0 0I0 0W0 0B1", None, "rank 0, action 3: 0B1 (line 3 of mine.txt) comes before 0F1", 3),
    ("0F0 0F1 0I0 0B1", None, "rank 0 never does 0W0", None),
    (None, "1F0 1B0 1I1 1W1", "rank 1, action 2: 1I1 (line 4 of mine.txt) comes before 1F1", 4),
    ("0F0 0F1 0F0 0I0 0W0 0B1", None, "rank 0, action 2: 0F0 (line 3 of mine.txt) is repeated", 3),
    ("0F0 0F1 0I0 0W0 0B1 0W1", None, "rank 0, action 5: 0W1 (line 3 of mine.txt) repeats what 0B1 did", 3),
    ("0F0 0F1 0I0 0B0 0W0 0B1", None, "rank 0, action 3: 0B0 (line 3 of mine.txt) repeats what 0I0 did", 3),
    ("0F0 0F1 0W0 0I0 0B1", None, "rank 0, action 2: 0W0 (line 3 of mine.txt) comes before 0I0", 3),
    ("0F0 0F1 0I0 0W0 0B1 1B0", None, "rank 0, action 5: 1B0 (line 3 of mine.txt) is on the wrong rank", 3),
    ("0F0 0I0 0F1 0W0 0B1", "1F1 1I1 1W1 1F0 1B0",
     "rank 0, action 1: 0I0 (line 3 of mine.txt) deadlocks", 3),
    ("0F0 0F1 0F2 0I0 0W0 0B1 0B2", None, "rank 1 never does 1F2", None),
])
def test_what_is_wrong_is_named(zero, one, what, line):
    rows = [f"rank 0: {zero}" if zero else GOOD[0], f"rank 1: {one}" if one else GOOD[1]]
    schedule = text.parse_schedule("\n".join(["# mine", "stages on ranks: 0 1", *rows]), "mine.txt")
    with pytest.raises(ScheduleError) as error:
        check_schedule(schedule)
    assert error.value.what == what
    assert error.value.where == ("mine.txt" if line is None else f"mine.txt:{line}")


@pytest.mark.parametrize("zero, one, what", [
    ("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", "rank 0, action 2: 0B0 comes before 0RECV_B0"),
    ("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0",
     "rank 0, action 0: 0SEND_F0 sends a value that is not computed yet"),
    ("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", "rank 0 never does 0SEND_F0"),
    ("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0", "1RECV_F0 1F0 1B0 1SEND_B0", "rank 0, action 4: 0SEND_B0 transfers nothing"),
    ("0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", "rank 0, action 2: 0SEND_F0 is repeated"),
    ("0F0 0SEND_F0 0RECV_B0 0RECV_B1 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", "rank 0 never does 0F1"),
    ("0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1",
     "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1", "rank 1, action 0: 1RECV_F0 would receive the wrong value"),
    ("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", "rank 0, action 1: 0RECV_B0 deadlocks"),
])
def test_sends_and_receives_of_ones_own(zero, one, what):
    with pytest.raises(ScheduleError) as error:
        check_schedule(text.parse_schedule(f"{zero}\n{one}"))
    assert error.value.what.replace(" (line 1 of <text>)", "").replace(" (line 2 of <text>)", "") == what


def test_no_change_of_one_action_goes_unseen():
    chance = random.Random(SEED)
    for _ in range(300):
        schedule = generate(chance.choice(list(GENERATORS)), chance.randint(1, 4), chance.randint(1, 6))
        rows = [list(row) for row in schedule.actions]
        row = chance.choice(rows)
        at = chance.randrange(len(row))
        change = chance.choice(("remove", "double", "other kind"))
        said = row[at]
        if change == "remove":
            row.pop(at)
        elif change == "double":
            row.insert(chance.randrange(len(row) + 1), said)
        else:
            row[at] = said = said._replace(kind=chance.choice("FBIW".replace(said.kind, "")))
        head = f"stages on ranks: {' '.join(map(str, schedule.rank_of))}\n"
        broken = head + "\n".join(f"rank {r}: " + " ".join(map(str, row)) for r, row in enumerate(rows))
        with pytest.raises(ScheduleError) as error:
            check_schedule(text.parse_schedule(broken))
        assert re.search(rf"\b{said.stage}[FBIW]{said.micro_batch}\b", error.value.what), (
            f"seed {SEED}: {schedule.name}, {change} {said}: {error.value}")


def test_it_takes_milliseconds():
    for name in GENERATORS:
        schedule, best = generate(name, 8, 32), 1.0
        for _ in range(3):
            begin = time.process_time()
            check_schedule(schedule)
            best = min(best, time.process_time() - begin)
        assert best < 0.05, f"{name}: {best * 1e3:.0f} ms for {len(schedule)} actions"


# ---- names, text, pictures


@pytest.mark.parametrize("name, args, what, fix", [
    ("zbh1", (4, 8), "there is no schedule 'zbh1'", "zb-h1 or zb-h2 or zb-v"),
    ("1F1B", (4, 8), "there is no schedule '1F1B'", "1f1b"),
    ("", (4, 8), "there is no schedule ''", "one of these, or a file with your own"),
    ("1f1b", (0, 8), "0 ranks", "1 or more ranks"),
    ("1f1b", (4, -1), "-1 micro-batches", "1 or more micro-batches"),
    ("1f1b", (4, 8, 2), "1f1b with 2 stages on a rank", "1, or one of interleaved, bfs, zb-h1"),
    ("zb-v", (4, 8, 1), "zb-v with 1 stages on a rank", "2, or one of interleaved, bfs, zb-h1"),
])
def test_what_generate_cannot_make(name, args, what, fix):
    with pytest.raises(ScheduleError) as error:
        generate(name, *args)
    assert error.value.what == what and error.value.fix == fix


@pytest.mark.parametrize("name", GENERATORS)
def test_text_and_back(name, tmp_path):
    schedule = generate(name, 3, 5)
    file = tmp_path / f"{name}.txt"
    file.write_text(text.format_schedule(schedule))
    assert text.read_schedule(file) == schedule
    file.write_text(text.format_schedule(schedule), encoding="utf-8-sig")        # as some editors save it
    assert text.read_schedule(file) == schedule
    program = communicate(schedule)
    assert text.parse_schedule(text.format_schedule(program)).actions == program.actions


def test_text_as_others_write_it():
    # As torch.distributed.pipelining writes them: idle moments are empty.
    own = text.parse_schedule("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n")
    assert own.actions == generate("gpipe", 2, 2).actions[:1] + generate("1f1b", 2, 2).actions[1:]
    assert own.rank_of == (0, 1) and own.micro_batches == 2
    split = text.parse_schedule("rank 1: 1F0\nRank 0: 0F0 # begin\nrank 1: 1B0\nrank 0: 0B0")
    assert check_schedule(split).peak_activations == (1, 1)
    assert split.lines == ((2, 4), (1, 3))


@pytest.mark.parametrize("written, what, where", [
    ("", "a schedule without actions", "<text>"),
    ("# nothing\nrank 0:", "a schedule without actions", "<text>"),
    ("0F0 0X0", "'0X0' is not an action", "<text>:1"),
    ("0F0\n\n0B", "'0B' is not an action", "<text>:3"),
    ("0F0 0B0\n0F1 0B1", "rank 1 has 0F1, but stage 0 is on rank 0", "<text>:2"),
    ("1F0 1B0", "no rank has a forward of stage 0", "<text>"),
    ("stages on ranks: 0\n0F0 1F0", "1F0 is of a stage that does not exist", "<text>:2"),
    ("stages on ranks: 0 x\n0F0 0B0", "'x' is not a rank, stage or micro-batch", "<text>:1"),
    ("0F99999999", "'99999999' is not a rank, stage or micro-batch", "<text>:1"),
])
def test_text_that_is_none(written, what, where):
    with pytest.raises(ScheduleError) as error:
        text.parse_schedule(written)
    assert (error.value.what, error.value.where) == (what, where)


def test_any_text_is_a_schedule_or_an_error_of_its_own():
    chance = random.Random(SEED)
    words = ["0F0", "0B0", "1F0", "1B0", "0I0", "1W0", "0SEND_F0", "1RECV_F0", "rank 0:", "rank 1:", "rank 2:", "\n",
             "\n", ",", "#", "stages on ranks:", "0", "1", "0F1", "2F0", "-1F0", "rank:", "0F0F0", "\u0663F0"]
    made = 0
    for _ in range(3000):
        written = " ".join(chance.choices(words, k=chance.randint(0, 12)))
        try:
            check_schedule(text.parse_schedule(written))
            made += 1
        except ScheduleError as error:
            assert error.what and error.why, f"seed {SEED}: {written!r}"
    assert made < 3000


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ScheduleError, match="nowhere.txt could not be read"):
        text.read_schedule(tmp_path / "nowhere.txt")


def test_actions_are_a_sequence():
    row = generate("1f1b", 2, 2).actions[0]
    assert row[0] == Action(0, "F", 0) and row[-1] == (0, "B", 1) and len(row) == 4
    assert repr(row[1:3]) == "0F1 0B0" and Action(0, "B", 0) in row
    assert generate("1f1b", 2, 2).only([F]).actions[1] == [Action(1, "F", 0), Action(1, "F", 1)]


def test_what_is_kept_over_time():
    assert list(activation_history(generate("zb-v", 1, 1), Fraction(1, 2))) == [
        [Fraction(1, 2), 1, Fraction(3, 4), Fraction(1, 2), Fraction(1, 4), 0]]
    for name in GENERATORS:
        assert all(held[-1] == 0 for held in activation_history(generate(name, 3, 4)))


def events_of(name, p, m, times=(1, 1, 1, 0)):
    schedule = generate(name, p, m)
    return simulate(schedule, Costs.exact(times, schedule.stages, schedule.chunks), record=True).events()


def test_a_timetable_in_text():
    assert timetable.as_text(events_of("1f1b", 2, 3)) == (
        "rank 0  F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2\n"
        "rank 1  .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..")
    assert timetable.as_text(events_of("zb-v", 2, 3)) == (
        "rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2 ..\n"
        "rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2")
    assert timetable.as_text(events_of("gpipe", 2, 2, ("1", "2", "1/3", "0.1")), width=18) == (
        "rank 0  FFFF......BBBBBBBB\n"
        "rank 1  ..FFFBBBBBBBBB....\n"
        "one column is 0.5667")


def test_a_trace_for_perfetto(tmp_path):
    events = events_of("zb-h1", 2, 2)
    timetable.write_trace(tmp_path / "t.json", events, 1e3, {"kept": [(0, 0.0, 1.0)]})
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [row["args"]["name"] for row in rows if row["ph"] == "M"] == ["rank 0", "rank 1"]
    drawn = [row for row in rows if row["ph"] == "X"]
    assert len(drawn) == len(events) == 12
    assert drawn[1] == {"ph": "X", "name": "0F1", "cat": "forward", "pid": 0, "tid": 0, "ts": 1000.0, "dur": 1000.0,
                        "args": {"stage": 0, "micro-batch": 1}}
    assert [row["args"] for row in rows if row["ph"] == "C"] == [{"kept": 1.0}]


def test_a_picture_of_two_runs(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import image

    file = tmp_path / "t.png"
    timetable.draw(file, {"simulated": events_of("zb-v", 3, 6), "measured": events_of("zb-v", 3, 6, (1, 2, 1, "1/7"))})
    pixels = image.imread(file)
    for colours in (timetable.FIRST_STAGE_COLOURS, timetable.LATER_STAGE_COLOURS):
        for kind in "FIW":
            colour = [int(colours[kind][i:i + 2], 16) / 255 for i in (1, 3, 5)]
            assert (abs(pixels[..., :3] - colour).max(-1) < 0.01).mean() > 0.01, f"no {kind} to be seen"
