"""What stands above a folded cell of an exercise: what it has, instead of "Show code cell content"."""
from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx

PROMPTS = {"tag_check": "How an answer is checked", "tag_solution": "A solution"}


def _name(app: Sphinx, tree: nodes.document) -> None:
    for cell in tree.findall(nodes.container):
        for tag in PROMPTS.keys() & cell["classes"]:
            cell["prompt_show"] = cell["prompt_hide"] = PROMPTS[tag]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", _name)
    return {"parallel_read_safe": True}
