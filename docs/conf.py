"""How Sphinx builds the site: `make docs`. The pages are those of the repository, so links among them work anywhere.

Every warning is an error: of a broken link, of a page that no table of contents names, of a notebook that fails.
"""
from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

from pygments.lexers import TextLexer
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))       # builder/

import globaltensor


def digest() -> str:
    """Of the library itself: what notebooks show was made by this code."""
    files = sorted(path for path in Path(globaltensor.__file__).parent.rglob("*.*") if path.suffix in (".py", ".so"))
    return sha256(b"".join(sha256(path.read_bytes()).digest() for path in files)).hexdigest()[:16]


project = "globaltensor"
author = "the globaltensor contributors"
copyright = author
version = release = globaltensor.__version__

# The folder of the sources is that of the repository.
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/results/*.md"]
exclude_patterns = [".*", "build", "globaltensor", "csrc", "tests", "examples"]

extensions = ["myst_nb", "builder.folded_cells", "builder.reference", "builder.source_pages"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "source": None}
nb_execution_mode = "cache"                          # notebooks are run again where they or the library changed
nb_execution_cache_path = str(Path(__file__).parents[1] / "build" / "notebooks" / digest())
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_in_temp = True
nb_merge_streams = True

html_theme = "furo"
html_title = f"globaltensor {version}"
html_copy_source = False
html_extra_path = ["builder/index.html"]            # the first page is docs/index.html
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


def setup(app: Sphinx) -> None:
    app.add_lexer("layers", TextLexer)               # the block of docs/design.md that a test reads
