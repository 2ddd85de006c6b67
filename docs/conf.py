"""How the Markdown of this repository becomes a site: `make site`.

The pages are the files as they lie in the repository, which is why its root is where they are read
from: links that work on a forge work on the site, and nothing is written twice.
"""

import inspect
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import docstrings  # noqa: E402 - it is there by now

project = "weightbus"
author = "The weightbus authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]

root_doc = "docs/index"
include_patterns = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**.md"),
    *("*_client/README.md", "tests/vectors/README.md", "tests/conformance/README.md"),
]
# Folders that are not walked: `src` leads back to the root.
exclude_patterns = [".*", "build", "dist", "src", "*/node_modules", "*/build", "*/dist", "*/target"]

# Markdown as forges read it.
myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough"]
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]  # excerpts of JSON with "..." in them

# The reference, from docstrings (docstrings.py). What stands in quotes is what users write: only
# the dashes that Sphinx puts in are made dashes.
smartquotes_action = "D"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "weightbus"
html_extra_path = ["site"]  # index.html, which leads to the first page
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2f6fb0", "color-brand-content": "#2f6fb0"},
    "dark_css_variables": {"color-brand-primary": "#7db4e6", "color-brand-content": "#7db4e6"},
}


def _send_home(value: object) -> None:
    """Have a public class be where it is written, which is where Sphinx reads in which order."""
    members = vars(value).values() if inspect.isclass(value) else ()
    homes = {m.__module__ for m in members if inspect.isfunction(m)}
    inner = [home for home in homes if home and home.startswith("weightbus.")]
    if inner:
        value.__module__ = inner[0]


def setup(app: Sphinx) -> None:
    """Have what is documented read from this checkout, whatever is installed beside it."""
    import weightbus

    read = Path(weightbus.__file__).resolve().parent
    if read != ROOT / "src" / "weightbus":
        sys.exit(f"weightbus is imported from {read}: install this checkout (make site does)")
    for face in (weightbus, weightbus.types):
        for public in face.__all__:
            _send_home(getattr(face, public))
    app.connect("autodoc-process-docstring", docstrings.on_docstring)
    app.connect("autodoc-process-signature", docstrings.on_signature)
