"""The notebooks of docs/learn as files for Jupyter: `python docs/builder/jupyter.py FOLDER` writes all of them there.

Checks and solutions are folded, as on the site, and links from one notebook to another lead to the other file.
"""
from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook

LEARN = Path(__file__).resolve().parents[1] / "learn"


def as_jupyter(page: Path) -> nbformat.NotebookNode:
    """A page as a notebook that has not been run."""
    notebook = read_myst_markdown_notebook(page.read_text())
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if {"check", "solution"} & {*tags}:
            cell.metadata["jupyter"] = {"source_hidden": True, "outputs_hidden": "solution" in tags}
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\(([\w-]+)\.md\)", r"](\1.ipynb)", cell.source)
    return notebook


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted(LEARN.glob("*.md")):
        if page.name != "index.md":
            nbformat.write(as_jupyter(page), folder / f"{page.stem}.ipynb")
            print(folder / f"{page.stem}.ipynb")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
