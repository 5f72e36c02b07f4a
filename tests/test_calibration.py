"""Plans that others measured, beside what is simulated: before and after a cluster is calibrated by half of them.

`data/measured_plans.csv` has, under `source`,
    vTrain        VIA-Research/vTrain, data/ground_truth_single.csv and ground_truth_multi.csv (MIT, Copyright (c) 2024
                  VIA Research Group at KAIST): Megatron-DeepSpeed on A100 hosts of 8, plain attention
    llm-foundry   mosaicml/llm-foundry, scripts/train/benchmarking/README.md (Apache-2.0): MPT, FSDP, flash attention
"""
from __future__ import annotations

import csv
import dataclasses
import json
import random
import sys
from pathlib import Path

import pytest

from globaltensor.cli import main
from globaltensor.simulator.calibration import calibrate, quality
from globaltensor.simulator.cluster import KNOWN, Link
from globaltensor.simulator.evaluation import evaluate, read_rows

TABLE = Path(__file__).parent / "data" / "measured_plans.csv"
A100 = KNOWN["dgx-a100"]
SEED = 20261123


def rows(source):
    sources = [line["source"] for line in csv.DictReader(TABLE.open())]
    return [row for row, its in zip(read_rows(str(TABLE)), sources, strict=True) if its == source]


def times(of, cluster):
    return [evaluate(row, cluster).step_time for row in of]


def test_all_that_was_run_fits():
    """ZeRO 3 has two layers gathered, and flash attention keeps no s x s matrix."""
    zero3 = rows("llm-foundry")
    found = [evaluate(row, A100) for row in zero3]
    assert len(found) == 61 and all(one.fits for one in found)
    ratios = sorted(one.step_time / row.measured for one, row in zip(found, zero3))
    assert 0.9 < ratios[30] < 1.1 and 0.7 < ratios[0] and ratios[-1] < 1.3, "with nothing fitted"
    assert all(evaluate(row, A100).fits for row in rows("vTrain"))


def test_rates_are_found_again():
    """Those with which times were simulated, from another description; what no row tells about stays."""
    true = dataclasses.replace(A100, efficiency=0.5, memory_bandwidth=1e12, local=Link(4e-5, 1e11), kernel_launch=4e-5,
                               micro_batch_overhead=2e-3, step_overhead=1e-2)
    one_host = [row for row in rows("vTrain") if row.plan.devices <= 8]
    some = [dataclasses.replace(row, measured=evaluate(row, true).step_time)
            for row in random.Random(SEED).sample(one_host, 20)]
    found = calibrate(some, A100, "mine")
    assert found.name == "mine" and found.remote.bandwidth == pytest.approx(A100.remote.bandwidth, rel=0.02)
    assert quality(some, times(some, A100)).error > 0.15 > 0.02 > quality(some, times(some, found)).error
    others = [dataclasses.replace(row, measured=evaluate(row, true).step_time) for row in one_host[::9]]
    agreed = quality(others, times(others, found))
    assert agreed.error < 0.03 and agreed.choice < 1.01 and agreed.rank > 0.9, agreed


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 1])
def test_the_better_half_of_what_was_measured_is_chosen_after_calibration_by_the_other(first):
    measured = rows("vTrain")
    groups = sorted({repr(row.group) for row in measured if row.plan.devices <= 8})
    half = set(groups[first::2])
    rest = [row for row in measured if row.plan.devices <= 8 and repr(row.group) not in half]
    many = [row for row in measured if row.plan.devices > 8]
    for own, beyond in ((None, many), (64, [row for row in many if row.plan.devices == 256]),
                        (256, [row for row in many if row.plan.devices == 64])):
        found = calibrate([row for row in measured if repr(row.group) in half or row.plan.devices == own], A100)
        one_host, hosts = (quality(several, times(several, found)) for several in (rest, beyond))
        print(f"{own} calibrated, {found}\none host {one_host}\nseveral {hosts}")
        assert one_host.error < 0.10 and one_host.choice < 1.05 and one_host.rank > 0.9
        assert hosts.error < 0.15 and hosts.choice < 1.05 and hosts.rank > 0.7


def written(tmp_path, changes, count=12):
    """The table's first rows in a file; `changes`: of the first row."""
    lines = list(csv.DictReader(TABLE.open()))[:count]
    lines[0] |= changes
    names = [name for name in lines[0] if lines[0][name] is not None]
    file = tmp_path / "rows.csv"
    with file.open("w") as stream:
        table = csv.DictWriter(stream, names, extrasaction="ignore")
        table.writeheader()
        table.writerows(lines)
    return file


def test_by_the_commands(tmp_path, capsys):
    file = written(tmp_path, {})
    assert main(["calibrate", str(file), "--name", "mine"]) == 0
    said = capsys.readouterr()
    assert "12 measured steps: off by" in said.err
    (tmp_path / "mine.json").write_text(said.out, encoding="utf-8-sig")      # as some editors save it
    assert main(["plan", "--evaluate", str(file), "--cluster", str(tmp_path / "mine.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 12 and all(set(one) == {"step_time", "memory", "fits"} for one in found)
    assert found[0]["step_time"] == pytest.approx(0.1606, rel=0.3)
    assert main(["plan", "--evaluate", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 14 and lines[0].split()[:2] == ["layers", "hidden"] and "measured steps" in lines[-1]


@pytest.mark.parametrize("comma", [",", ", ", " ,"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_rows_are_read_as_other_programs_write_them(tmp_path, encoding, comma):
    plain = read_rows(str(written(tmp_path, {})))
    text = (tmp_path / "rows.csv").read_text().replace(",", comma)
    (tmp_path / "rows.csv").write_text(text, encoding=encoding)
    assert read_rows(str(tmp_path / "rows.csv")) == plain


@pytest.mark.parametrize("changes, text", [
    ({"tp": None}, "has no column 'tp'"), ({"tp": "x"}, "line 2: tp is 'x'"), ({"zero": "4"}, "0, 1, 2 or 3"),
    ({"gpus": "9"}, "gpus 8"), ({"recompute": "some"}, "none, selective, full"), ({"heads": "7"}, "hidden 2048 over 7"),
    ({"global_batch": "7"}, "line 2: a global batch of 7"), ({"measured_ms": "-1"}, "measured_ms is '-1'"),
    ({"attention": "ring"}, "flash, plain")], ids=str)
def test_rows_that_cannot_be_read(tmp_path, capsys, changes, text):
    assert main(["plan", "--evaluate", str(written(tmp_path, changes))]) == 2
    assert text in capsys.readouterr().err


def test_what_calibration_needs(tmp_path, capsys, monkeypatch):
    assert main(["calibrate", str(written(tmp_path, {}, 4))]) == 2
    assert "4 rows with a measured time" in capsys.readouterr().err
    assert main(["plan"]) == 2 and "--evaluate rows.csv" in capsys.readouterr().err
    assert main(["plan", "--evaluate", str(tmp_path / "none.csv")]) == 2
    assert "could not be read" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert main(["calibrate", str(written(tmp_path, {}))]) == 1
    assert "globaltensor[plan]" in capsys.readouterr().err
