"""What builds the site: `make docs`. Sphinx does the work; here stands what is not Markdown.

    definitions     where a name is defined in a source file
    source_pages    links into the code lead to pages of the code
    docstrings      our docstrings as Markdown
    reference       every public name, every command, and every message of an error
    notebooks       the cells of the pages in docs/learn
    jupyter         these pages as files for Jupyter
    folded_cells    what stands above a cell of an exercise that is folded
"""
