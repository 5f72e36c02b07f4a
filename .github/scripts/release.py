"""Makes a release: version, changelog, tag, wheels and docs. docs/releasing.md is the checklist around it.

    make release VERSION=0.2.0                     all of it, in this checkout; nothing is uploaded
    make release VERSION=0.2.0 ARGS=--dry-run      the same in a copy that is thrown away, up to the tag

It stops before it changes anything where the working tree has changes, the version is not a later one, its tag is
there, or the changelog has nothing to release.
"""
from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?")
FIRST = "This will be 0.1.0, the first release.\n\n"
SDIST = "import build_backend; print(build_backend.build_sdist('dist'))"


class ReleaseError(Exception):
    """What stands in the way, and what to type."""


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def order(version: str) -> tuple[int, ...]:
    """0.2.0rc1 comes before 0.2.0."""
    parts = VERSION.fullmatch(version)
    if parts is None:
        raise ReleaseError(f"{version!r} is not a version\n  try: 0.2.0, or 0.2.0rc1")
    stage = {"a": 0, "b": 1, "rc": 2, None: 3}[parts[4]]
    return (*map(int, parts.groups()[:3]), stage, int(parts[5] or 0))


def current(folder: Path) -> str:
    return re.search(r'(?m)^__version__ = "(.+)"', (folder / "globaltensor/__init__.py").read_text())[1]


def released(changelog: str) -> list[str]:
    """The versions that the changelog has sections of, the last first."""
    return re.findall(r"(?m)^## \[(\d.+?)\]", changelog)


def check(folder: Path, version: str) -> None:
    """Raise ReleaseError for what stands in the way."""
    if changed := git(folder, "status", "--porcelain"):
        raise ReleaseError(f"there are changes that are not committed:\n{changed}\n  try: git commit, or git stash")
    changelog = (folder / "CHANGELOG.md").read_text()
    last = released(changelog)[:1]
    least = order(last[0]) if last else order("0.0.0")
    if order(version) <= least or order(version) < order(current(folder)):
        raise ReleaseError(f"{version} is not later than {last[0] if last else current(folder)}\n"
                           "  try: a higher number")
    if git(folder, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} is there\n  try: a higher number, or git tag -d v{version}, if nobody "
                           "has it")
    section = changelog.partition("## [Unreleased]\n")[2].partition("\n## [")[0]
    if not re.search(r"(?m)^- ", section):
        raise ReleaseError("CHANGELOG.md has nothing under [Unreleased]\n"
                           "  try: a line for each change that users notice")


def edit(folder: Path, version: str, date: str) -> None:
    """Write the version and the date where they belong."""
    face = folder / "globaltensor" / "__init__.py"
    face.write_text(re.sub(r'(?m)^__version__ = ".+"', f'__version__ = "{version}"', face.read_text()))
    changelog = folder / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(FIRST, "").replace(
        "## [Unreleased]\n", f"## [Unreleased]\n\n## [{version}] - {date}\n", 1))
    citation = folder / "CITATION.cff"
    text = re.sub(r"(?m)^(version|date-released): .*\n", "", citation.read_text())
    citation.write_text(f"{text.rstrip()}\nversion: {version}\ndate-released: {date}\n")


def commit(folder: Path, version: str) -> None:
    git(folder, "add", "globaltensor/__init__.py", "CHANGELOG.md", "CITATION.cff")
    git(folder, "commit", "-q", "-m", f"Release {version}")
    git(folder, "tag", "-a", f"v{version}", "-m", f"globaltensor {version}")


def run(*command: str) -> None:
    print(f"+ {' '.join(command)}", flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def release(version: str) -> None:
    """All of it, here."""
    check(ROOT, version)
    run("make", "check")
    edit(ROOT, version, today())
    commit(ROOT, version)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run("make", "wheels")
    run(sys.executable, "-c", SDIST)
    if re.search(r"(?m)^docs:", (ROOT / "Makefile").read_text()):
        run("make", "docs")
    print(f"\nReleased {version} here; nothing was uploaded. Go on with docs/releasing.md.")


def rehearse(version: str) -> None:
    """Up to the tag, in a copy that is thrown away."""
    check(ROOT, version)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        git(ROOT, "clone", "-q", "--no-hardlinks", str(ROOT), str(copy))
        for name in ("user.name", "user.email"):
            git(copy, "config", name, git(ROOT, "config", name))
        before = git(copy, "rev-parse", "HEAD")
        edit(copy, version, today())
        commit(copy, version)
        print(git(copy, "diff", before, "HEAD"))
        print(f"\nThe commit has the tag {git(copy, 'describe', '--exact-match')}. A release would also run: "
              "make check, make wheels, the sdist, the docs.\nNothing was changed here.")


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def main() -> int:
    of = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of.add_argument("version", help="such as 0.2.0 or 0.2.0rc1")
    of.add_argument("--dry-run", action="store_true", help="in a copy that is thrown away, up to the tag")
    chosen = of.parse_args()
    try:
        (rehearse if chosen.dry_run else release)(chosen.version)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"release: {' '.join(map(str, error.cmd))} failed with exit code {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
