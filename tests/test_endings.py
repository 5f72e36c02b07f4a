"""How ranks end, and what the others are told of it: also where the process lives on, or no launcher
has started it."""
from __future__ import annotations

import pytest
import torch
from harness import PYTHON, RUN, Started, environment, free_port

import globaltensor as gt
from globaltensor.runtime.process_end import is_good_exit

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("real_processes")]

BEGIN = """
import os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import globaltensor as gt
everywhere = gt.placement.all("cpu")
x = gt.ones(6, 8, placement=everywhere, sbp=gt.sbp.split(0))
x.sum().item()
if gt.rank() == 1:
"""
POOL = "ThreadPoolExecutor(1).submit(time.sleep, 999); "
ENDINGS = {                                          # of rank 1 -> exit code, what is said of it
    "threading.Thread(target=time.sleep, args=(999,)).start(); raise ValueError('mine')": (
        1, ["rank 1 failed: ValueError: mine"]),
    POOL + "sys.exit(3)": (3, ["rank 1 ended by sys.exit(3)   at ", "rank 1 failed: exit code 3"]),
    POOL + "sys.exit()": (1, ["rank 1 has ended, while rank 0 waited for it", "this call on every rank",
                              "rank 1 ended without an error, while others waited"]),
    "t = threading.Thread(target=lambda: {}['no'], name='mine'); t.start(); t.join(); sys.exit()": (
        1, ["why:   rank 1 has ended, after its thread mine raised KeyError: 'no'   at ", "try:   mend that error",
            "rank 1 ended without an error, while others waited: its thread mine raised KeyError: 'no'   at "]),
    "os._exit(0)": (1, ["rank 1 ended without an error, while others waited"]),
    "sys.exit(x.sum())": (1, ["rank 1:\ntensor(shape=[]", "rank 1 failed: tensor(shape=[]"]),
}


def run_program(folder, text, ranks=2):
    """Exit code, output, errors of a job that runs this program."""
    (folder / "program.py").write_text(text)
    return Started([*RUN, "-n", ranks, folder / "program.py"]).end(60)


@pytest.mark.parametrize("ending", [pytest.param(each, marks=[pytest.mark.long] if i else [])
                                    for i, each in enumerate(ENDINGS)])
def test_who_waits_for_a_rank_whose_program_has_ended_is_told_though_threads_of_it_live(ending, tmp_path):
    code, _, err = run_program(tmp_path, f"{BEGIN}    {ending}\nx.sum().item()\n")
    expected, words = ENDINGS[ending]
    assert code == expected and all(each in err for each in words), err


BROKEN = """
import os, torch, globaltensor as gt
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        if os.environ["RANK"] == "1" and os.environ["WORLD_SIZE"] == "2":
            raise OSError("bad luck")
        return torch.ones(2)
where = gt.placement.all("cpu")
for x in {loader}:
    x.sum().item()
print("done")
"""


@pytest.mark.parametrize("loader", ["gt.data.DataLoader(Rows(), 4, where, gt.sbp.split(0))", pytest.param(
    "gt.data.from_ranks(lambda rank: torch.utils.data.DataLoader(Rows(), 4), where)", marks=pytest.mark.long)])
def test_a_rank_that_cannot_read_its_rows_is_the_cause_and_is_left_out(loader, tmp_path):
    (tmp_path / "program.py").write_text(BROKEN.format(loader=loader))
    started = Started([*RUN, "-n", 2, "--min-ranks", 1, "--max-restarts", 1, tmp_path / "program.py"])
    code, out, err = started.end(90)
    assert (code, out) == (0, "done\n"), err
    assert 'raise OSError("bad luck")' in err and "rank 0:\nTraceback" not in err, err
    assert "rank 1 failed: OSError: bad luck\nglobaltensor: rank 0 could not go on then (" in err, err


def test_an_exit_is_good_by_its_number_alone():
    good, bad = (None, 0, False, gt.REQUEUE), (1, "", 0.0, torch.zeros(()), torch.ones(2), gt.REQUEUE + 1)
    assert [is_good_exit(SystemExit(code)) for code in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


def test_a_long_line_of_an_error_is_shown_whole_once_and_in_short_to_those_who_waited(tmp_path):
    code, _, err = run_program(tmp_path, f"{BEGIN}    raise ValueError('a' * 3_000_000)\nx.sum().item()\n")
    assert code == 1 and 3_000_000 < len(err) < 3_010_000 and "... (2999" in err, (code, len(err))


def test_a_rank_that_has_given_its_part_may_end_while_another_is_late(tmp_path):
    code, out, err = run_program(tmp_path, BEGIN + """    pass
time.sleep(4 * (gt.rank() == 2))
y = x.to_global(placement=gt.placement("cpu", [0]), sbp=gt.sbp.broadcast)
if gt.rank() == 0:
    print(y.to_local().sum().item())
""", 3)
    assert (code, out) == (0, "48.0\n"), err


@pytest.mark.long
def test_what_a_rank_forks_ends_as_any_process_and_is_no_rank(tmp_path):
    code, out, err = run_program(tmp_path, BEGIN + """    pass
for code in (0, 3):
    if not os.fork():
        sys.exit(code)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == code
if not os.fork():
    raise ValueError("of a child")
assert os.wait()[1]
print(x.sum().item())
""")
    assert (code, out) == (0, "48.0\n" * 2), err


@pytest.mark.parametrize("start, way", [
    ("fork", "raise ValueError('mine')"), pytest.param("spawn", "sys.exit(3)", marks=pytest.mark.long),
    pytest.param("spawn", "raise ValueError('mine')", marks=pytest.mark.long),
    pytest.param("fork", "sys.exit(3)", marks=pytest.mark.long)])
def test_a_rank_that_multiprocessing_starts_tells_how_it_failed(start, way, tmp_path):
    program = f"""
import multiprocessing, os, sys
def body(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="{free_port()}")
    import globaltensor as gt
    x = gt.ones(8, placement=gt.placement.all("cpu"), sbp=gt.sbp.split(0))
    x.sum().item()
    if rank == 1:
        {way}
    x.sum().item()
if __name__ == "__main__":
    ranks = [multiprocessing.get_context("{start}").Process(target=body, args=(rank,)) for rank in range(2)]
    [rank.start() for rank in ranks]
    [rank.join() for rank in ranks]
    print([rank.exitcode for rank in ranks])
"""
    (tmp_path / "program.py").write_text(program)
    _, out, err = Started([PYTHON, tmp_path / "program.py"], environment()).end(60)
    how = "raised ValueError: mine" if "raise" in way else "ended by sys.exit(3)"
    assert out == f"[1, {1 if 'raise' in way else 3}]\n" and f"rank 1 {how}   at " in err, f"{out}\n{err}"
