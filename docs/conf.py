"""How is the site built? `make docs`: Sphinx reads these pages, and the reference from the docstrings. No network."""

from __future__ import annotations

from typing import Any

from pygments.lexers.special import TextLexer

import vestige

project = "Vestige"
version = release = vestige.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"Vestige {release}"
html_copy_source = html_show_sourcelink = html_show_sphinx = False
exclude_patterns = ["conf.py"]
highlight_language = "text"

myst_heading_anchors = 4  # headings are linked to as on GitHub

default_role = "code"  # docstrings name code in single backquotes
add_module_names = False
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80


def setup(app: Any) -> None:
    app.add_lexer("mermaid", TextLexer)  # drawn on GitHub; here its arrows are read as they are
