"""The documentation site: `make docs` builds it from the repository's Markdown, with every link checked.

The source folder is the repository itself, so a relative link means the same on a code host and on the site.
"""

from __future__ import annotations

import re
from typing import Any

import hpcsched

project = "hpcsched"
version = release = hpcsched.__version__
root_doc = "docs/index"
LISTS = ("docs/index", "benchmarks/README", "examples/README")
"""Pages whose lists of pages make the side bar."""
include_patterns = [
    "docs/**.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/*.md",
    "examples/**.md",
    "profiles/README.md",
]
exclude_patterns = [".*", "build", "hpcsched", "tests"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
nitpicky = True

myst_heading_anchors = 3
smartquotes = False

# Signatures name classes of torch and of the standard library, and our own that nobody needs to call.
nitpick_ignore_regex = [("py:class", r".*")]
autodoc_mock_imports = ["torch", "numpy"]
autodoc_member_order = "bysource"
default_role = "code"
napoleon_use_ivar = True
maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"hpcsched {version}"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = html_show_sourcelink = False
html_additional_pages = {"index": "to-docs.html"}
templates_path = ["_templates"]

_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)#]+)\.md\)", re.MULTILINE)


def _toctrees(index: str) -> str:
    """The lists of an entrance page, section by section, as what Sphinx makes its side bar of."""
    _, *parts = _SECTION.split(index)
    trees = []
    for caption, text in zip(parts[::2], parts[1::2], strict=True):
        entries = "\n".join(f"{title} <{page}>" for title, page in _ENTRY.findall(text))
        if not entries:
            continue
        trees.append(f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n")
    return "".join(trees)


def setup(app: Any) -> None:
    def extend(_: Any, page: str, source: list[str]) -> None:
        if page in LISTS:
            source[0] += _toctrees(source[0])

    app.connect("source-read", extend)
