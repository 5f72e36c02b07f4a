"""Links into the code lead to pages of the code: `[...](../globaltensor/parallel/plan.py#Plan.of)` works on the site.

A page in Markdown links files of the repository, so that it can be read where the code is. For the site each of these
links gets the scheme `source:`, which Sphinx leaves alone; when a page is finished they become relative links to
`source/FILE.html`, and at the end these pages are written, with an anchor at each definition. A link to a file or a
name that is not there is a warning, by which `make docs` fails.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util import logging

from builder.definitions import definitions

LOG = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
SCHEME = "source:"


def to_sources(text: str, page: Path) -> str:
    """The text of a page, in which links to files that are not pages have the scheme."""

    def scheme(match: re.Match[str]) -> str:
        path, mark, name = match[1].partition("#")
        file = (page.parent / path).resolve()
        if not path or file.suffix == ".md" or not file.is_file() or file.suffix in (".svg", ".png", ".ipynb"):
            return match[0]
        return f"]({SCHEME}{file.relative_to(ROOT)}{mark}{name})"

    blocks = re.split(r"(?s)(```.*?\n```)", text)    # odd ones are code
    return "".join(block if index % 2 else re.sub(r"\]\(([^)\s:]+)\)", scheme, block)
                   for index, block in enumerate(blocks))


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = to_sources(source[0], Path(app.env.doc2path(docname)))


def _resolve(app: Sphinx, tree: nodes.document, docname: str) -> None:
    """The links of a page that is finished: relative ones, to pages that will be written."""
    linked: set[str] = app.env.__dict__.setdefault("linked_sources", set())
    for link in tree.findall(nodes.reference):
        target = link.get("refuri", "")
        if target.startswith(SCHEME):
            path, _, name = target.removeprefix(SCHEME).partition("#")
            linked.add(path)
            if name and name not in definitions(ROOT / path):
                LOG.warning("%s links %s#%s: there is no such definition", docname, path, name)
            link["refuri"] = app.builder.get_relative_uri(docname, f"source/{path}") + (f"#{name}" if name else "")


def _pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path in sorted(app.env.__dict__.get("linked_sources", ())):
        yield f"source/{path}", {"title": path, "body": page_of(path)}, "page.html"


def page_of(path: str) -> str:
    """A file as HTML, each of its definitions with an anchor of its name."""
    text = (ROOT / path).read_text()
    try:
        lexer = get_lexer_for_filename(path, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    names: dict[int, list[str]] = {}
    for name, line in (definitions(ROOT / path) if lexer.name != "Text only" else {}).items():
        names.setdefault(line, []).append(name)
    code = highlight(text, lexer, HtmlFormatter(nowrap=True)).splitlines()
    anchored = ["".join(f'<span id="{escape(name)}"></span>' for name in names.get(number, ())) + line
                for number, line in enumerate(code, 1)]
    body = "\n".join(anchored)
    return f'<h1>{escape(path)}</h1><div class="highlight"><pre>{body}</pre></div>'


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read)
    app.connect("doctree-resolved", _resolve)
    app.connect("html-collect-pages", _pages)
    return {"parallel_read_safe": True}
