"""Releases, rehearsed: .github/scripts/release.py in clones, up to the tag. Nothing is built or uploaded."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT

SCRIPT = Path(".github", "scripts", "release.py")


def typed(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """This checkout as it is, committed."""
    folder = tmp_path / "clone"
    for file in ("globaltensor/__init__.py", "CHANGELOG.md", "CITATION.cff", "Makefile", SCRIPT):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes((ROOT / file).read_bytes())
    for words in ("init -q -b main", "config user.name somebody", "config user.email nobody", "add .",
                  "commit -q -m first"):
        assert typed(folder, "git", *words.split()).returncode == 0
    return folder


def test_a_dry_run_shows_every_edit_and_makes_none(clone):
    before = typed(clone, "git", "rev-parse", "HEAD").stdout
    done = typed(clone, sys.executable, SCRIPT, "9.8.7", "--dry-run")
    assert done.returncode == 0, done.stderr
    for line in ('+__version__ = "9.8.7"', "+version: 9.8.7"):
        assert f"\n{line}\n" in done.stdout, line
    assert re.search(r"\n\+## \[9\.8\.7\] - \d{4}-\d\d-\d\d\n", done.stdout) and "the tag v9.8.7" in done.stdout
    assert typed(clone, "git", "rev-parse", "HEAD").stdout == before
    assert not typed(clone, "git", "status", "--porcelain").stdout and not typed(clone, "git", "tag").stdout


def test_what_a_release_writes_is_what_the_papers_are_checked_for(clone):
    """The edits alone, twice: the second release goes above the first."""
    code = (f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import release; from pathlib import Path\n"
            "for version, date in (('9.8.7', '2030-01-02'), ('9.9.0', '2030-03-04')):\n"
            "    release.edit(Path('.'), version, date); release.commit(Path('.'), version)\n"
            "print(release.released(Path('CHANGELOG.md').read_text())[:2], release.current(Path('.')))")
    done = typed(clone, sys.executable, "-c", code)
    assert done.stdout == "['9.9.0', '9.8.7'] 9.9.0\n", done.stderr
    assert typed(clone, "git", "tag").stdout.split() == ["v9.8.7", "v9.9.0"]
    citation = (clone / "CITATION.cff").read_text()
    assert citation.endswith("version: 9.9.0\ndate-released: 2030-03-04\n") and citation.count("version: 9") == 1
    headings = re.findall(r"(?m)^## \[(.+?)\](.*)", (clone / "CHANGELOG.md").read_text())
    assert headings[:3] == [("Unreleased", ""), ("9.9.0", " - 2030-03-04"), ("9.8.7", " - 2030-01-02")]
    assert "This will be" not in (clone / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("version, spoil, text", [
    ("9.8", "", "'9.8' is not a version\n  try: 0.2.0"), ("0.0.1", "", "0.0.1 is not later than"),
    ("0.1.0rc1", "", "0.1.0rc1 is not later than 0.1.0"), ("9.8.7", "git tag v9.8.7", "the tag v9.8.7 is there"),
    ("9.8.7", "touch note.txt", "changes that are not committed:\n?? note.txt"),
    ("9.8.7", "sed -i s/^-/*/ CHANGELOG.md && git commit -qam second", "has nothing under [Unreleased]")])
def test_what_stands_in_the_way_is_said(version, spoil, text, clone):
    assert subprocess.run(spoil or "true", shell=True, cwd=clone).returncode == 0
    for dry in ((), ("--dry-run",)):
        done = typed(clone, sys.executable, SCRIPT, version, *dry)
        assert done.returncode == 1 and text in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert 'version__ = "9' not in (clone / "globaltensor/__init__.py").read_text()


def test_the_makefile_has_both():
    text = (ROOT / "Makefile").read_text()
    for target, command in (("release", r"release\.py \$\(VERSION\) \$\(ARGS\)"), ("wheels", r"wheels\.py \$\(ARGS\)")):
        assert re.search(rf"(?m)^{target}:.*\n\t.*{command}$", text), target
