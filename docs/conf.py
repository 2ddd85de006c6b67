"""How the Markdown of this repository becomes a site: `make site`.

The pages are the files as they lie in the repository, which is why its root is where they are read
from: links that work on a forge work on the site, and nothing is written twice.
"""

import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent

project = "weightbus"
author = "The weightbus authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

root_doc = "docs/index"
include_patterns = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**.md"),
    *("*_client/README.md", "tests/vectors/README.md", "tests/conformance/README.md"),
]
# Folders that are not walked: `.links` leads back to the root.
exclude_patterns = [".*", "build", "dist", "*/node_modules", "*/build", "*/dist", "*/target"]

# Markdown as forges read it.
myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough"]
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]  # excerpts of JSON with "..." in them

# The reference, from docstrings in Google's style, in which `x` is code as it is in Markdown.
default_role = "literal"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "weightbus"
html_extra_path = ["site"]  # index.html, which leads to the first page
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2f6fb0", "color-brand-content": "#2f6fb0"},
    "dark_css_variables": {"color-brand-primary": "#7db4e6", "color-brand-content": "#7db4e6"},
}


def setup(app: Sphinx) -> None:
    """Have what is documented read from this checkout, whatever is installed beside it."""
    del app
    import weightbus

    read = Path(weightbus.__file__).resolve().parent
    if read != ROOT:
        sys.exit(f"weightbus is imported from {read}: install this checkout (make site does)")
