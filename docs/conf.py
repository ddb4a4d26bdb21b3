"""Sphinx configuration. It opens no network connection: no intersphinx, no remote fonts."""

from importlib.metadata import version as installed_version

project = "dask_redist"
author = "dask_redist developers"
copyright = "dask_redist developers"
release = version = installed_version("dask_redist")

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]

# The reference lists what `dask_redist.__all__` lists, each on a page of its own.
autosummary_generate = True
autosummary_ignore_module_all = False
autosummary_imported_members = True
autodoc_typehints = "none"  # the numpydoc sections give the types
numpydoc_show_class_members = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"dask_redist {release}"
html_static_path = ["_static"]
