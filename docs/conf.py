"""How Sphinx builds the documentation: ``make docs``."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = PROJECT["name"]
author = "the dmiddleware developers"
copyright = "the dmiddleware developers; Apache License 2.0"
version = release = PROJECT["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
templates_path: list[str] = []

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

# The public names of a module, in the order in which it lists them, with the types in the
# signature: the docstrings do not repeat them.
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Reads", "params_style"), ("Writes", "params_style")]
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"{project} {version}"
html_static_path: list[str] = []
html_theme_options = {"navigation_with_keys": True}
html_show_sourcelink = False
