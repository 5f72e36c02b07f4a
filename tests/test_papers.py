"""The papers that a stranger reads first: links lead somewhere, commands exist, nothing is invented."""
from __future__ import annotations

import re
import tomllib

import pytest
import yaml
from harness import ROOT

from globaltensor.cli import findings

PAPERS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Addresses that may stand in the papers: of standards, of papers and of other projects, never of people.
HOSTS = ("https://keepachangelog.com/", "https://semver.org/", "https://arxiv.org/", "https://docs.pytorch.org/docs/",
         "https://github.com/pytorch/torchtitan", "https://www.deepspeed.ai/docs/", "https://docs.jax.dev/en/",
         "https://docs.nvidia.com/megatron-core/", "https://github.com/Oneflow-Inc/oneflow/")


def links(text: str) -> list[str]:
    """Targets of Markdown links, outside of blocks of code."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S))


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(paper):
    for target in links(paper.read_text()):
        if "://" in target:
            assert target.startswith(HOSTS), target
        else:
            file = target.partition("#")[0]
            assert not file or (paper.parent / file).exists(), target


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_address_of_a_person_and_no_badge(paper):
    text = paper.read_text()
    assert not re.search(r"[\w.]+@[\w-]+\.[a-z]+", text) and "badge" not in text and "doi.org" not in text


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(paper):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?m)(?:^|`)make ([a-z-]+)", paper.read_text()):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"


def test_the_matrix_is_what_the_package_says_it_supports():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    matrix = jobs["cpu"]["strategy"]["matrix"]
    classified = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert matrix["python"] == classified
    assert PROJECT["requires-python"] == f">={matrix['python'][0]}"
    minors = [int(version.split(".")[1]) for version in matrix["torch"]]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert f"torch>=2.{minors[0]},<2.{minors[-1] + 1}" in PROJECT["dependencies"]
    assert (findings.OLDEST_TORCH, findings.NEXT_TORCH) == ((2, minors[0]), (2, minors[-1] + 1)), "the doctor's"
    makefile = (ROOT / "Makefile").read_text()
    assert any(f"torch=={entry['torch']}" in makefile for entry in matrix["include"]), "CI runs what make installs"


def test_the_hooks_are_the_tools_of_the_project():
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    for hook in repos[0]["hooks"]:
        tool = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert tool in PROJECT["optional-dependencies"]["test"]
        assert re.search(rf"(?m)^check:.*\n(\t.*\n)*\t\.venv/bin/{tool}\b", (ROOT / "Makefile").read_text()), tool


def test_the_citation_is_that_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["title"] == PROJECT["name"] and citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    releases = re.findall(r"(?m)^## \[(\d.+?)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text())
    cited = [(str(citation["version"]), str(citation["date-released"]))] if "version" in citation else []
    assert cited == releases[:1] and not {"doi", "url"} & citation.keys()      # release.py writes both


def test_templates_and_workflows_are_yaml():
    for file in (ROOT / ".github").rglob("*"):
        if file.suffix == ".yml":
            assert yaml.safe_load(file.read_text())
        elif file.parent.name == "ISSUE_TEMPLATE":
            head = yaml.safe_load(file.read_text().split("---")[1])
            assert head["name"] and head["about"]


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"(?m)^## \[(.+?)\]", text)
    assert headings[0] == "Unreleased"
    assert set(re.findall(r"(?m)^### (.+)", text)) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
