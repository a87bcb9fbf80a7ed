"""How `make docs` builds the site with Sphinx. Strict: a warning fails the build.

The root of the sources is the repository, not docs/: so links to results, examples and the files at
the top lead to pages of the site, as they do where the repository is browsed.
"""

import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "site"))

project = "regard"
author = "the authors of regard"
copyright = "the authors of regard, Apache-2.0"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "markdown_docstrings",
    "result_titles",
    "table_cells",
]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/*/*.md",
    "benchmarks/results/*.md",
    "src/regard/backends/README.md",
    "src/regard/backends/triton/README.md",
    "tests/peers/results.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LOG.md",
    "SECURITY.md",
]

# The chapters are notebooks, run at every build: a cell that fails stops it. What they print as
# progress or warning is not shown. Nothing is asked of the network, so no widgets either.
logging.getLogger("traitlets").setLevel(logging.WARNING)
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 900
nb_merge_streams = True
nb_output_stderr = "remove"
nb_ipywidgets_js = {}

# Anchors as where the repository is browsed.
myst_heading_anchors = 6
highlight_language = "text"
# Quotes and ellipses, but no dashes: --option in a sentence stays what can be typed.
smartquotes_action = "qe"

autodoc_member_order = "groupwise"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "regard"
templates_path = ["site/templates"]
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_extra_path = ["site/entrance"]
html_copy_source = False
html_show_sphinx = False


def setup(app: Any) -> None:
    # What a chapter shows depends on all of regard, of which Sphinx knows nothing.
    app.connect("env-get-outdated", lambda app, env, added, changed, removed: [
        name for name in env.found_docs if name.startswith("docs/chapters/")
    ])  # fmt: skip
