"""Pages of docs/start and docs/how-to do what they say, block by block, as a reader would follow them."""
from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT, Started, environment, good
from pages import FOLLOWED, NAMED, blocks, follow

PAGES = sorted(page for folder in FOLLOWED for page in (ROOT / "docs" / folder).glob("*.md"))
QUICK = "debug-a-layout"                             # the page that `make test` follows; others start many processes
BIN = Path(sys.executable).parent


@pytest.mark.processes
@pytest.mark.parametrize("page", [
    pytest.param(page, id=f"{page.parent.name}/{page.stem}", marks=[] if page.stem == QUICK else pytest.mark.long)
    for page in PAGES])
def test_a_page_is_followed(page, tmp_path):
    assert not (wrong := follow(page, tmp_path, BIN, environment())), "\n".join(wrong)


def test_each_program_that_is_saved_is_run():
    for page in PAGES:
        shown = blocks(page.read_text())
        typed = "\n".join(text for kind, text, _ in shown if kind in ("sh", "shell", "python"))
        for kind, text, _ in shown:
            if kind == "python" and (named := NAMED.match(text)):
                name = named[1].removesuffix(".py")
                assert re.search(rf"(?m)(\b{name}\.py\b(?<!# {name}\.py))|from {name} import", typed), f"{page}: {name}"


def test_the_lines_of_the_readme_are_those_of_the_page():
    shown, = re.findall(r"(?s)```py\n(.*?)```", (ROOT / "README.md").read_text())
    page = (ROOT / "docs" / "start" / "ten-minutes.md").read_text().splitlines()
    assert not set(shown.splitlines()) - set(page)


@pytest.mark.processes
@pytest.mark.long
def test_stacks_of_a_loop_are_those_of_the_page(tmp_path):
    """`globaltensor ps` and `stacks` of docs/how-to/debug-a-deadlock.md, while the loop goes on."""
    shown = blocks((ROOT / "docs" / "how-to" / "debug-a-deadlock.md").read_text())
    program, = (text for _, text, _ in shown if text.startswith("# loop.py"))
    expected, = (output for kind, _, output in shown if kind == "shell")
    (tmp_path / "loop.py").write_text(program)
    job = Started([BIN / "globaltensor", "run", "-n", 2, "loop.py"], cwd=tmp_path)
    try:
        until = time.monotonic() + 60
        while "in wait_for_a_file" not in (stacks := good([BIN / "globaltensor", "stacks"])) or "line 14" not in stacks:
            assert time.monotonic() < until, stacks
        said = good([BIN / "globaltensor", "ps"]) + stacks
    finally:
        job.process.send_signal(signal.SIGINT)
        job.end()
    for line in expected.splitlines():
        any_job = re.sub(r"^(job )?1\b", r"\1...", re.sub(r"\d+ MB +\d:\d\d:\d\d", "...", line))
        pattern = re.sub(r"(\\ )+", " +", re.escape(any_job).replace(r"\.\.\.", ".*"))
        assert re.search(rf"(?m)^{pattern}$", said), f"{line}\n{said}"


def test_what_a_page_says_and_does_not_do_is_told(tmp_path):
    """The follower itself: an output that differs, and a command that fails."""
    page = tmp_path / "page.md"
    page.write_text("```python\n# a.py\nprint(3)\n```\n```sh\npython a.py\n```\n```text\n3\n```\n"
                    "```sh\npython a.py | sed s/3/4/   # by a shell\n```\n```text\n...\n```\n")
    assert follow(page, tmp_path, BIN, environment()) == []
    page.write_text("```python\nprint(3)\n```\n```text\n4\n```\n```sh\npython nowhere.py\n```\n")
    first, second = follow(page, tmp_path, BIN, environment())
    assert "printed\n3\nand the page says\n4" in first and "block 2 ended with code" in second
