"""Configuration of the documentation site, which `make docs` builds."""

import hashlib
import os
import re
import sys
from importlib.metadata import files
from pathlib import Path
from urllib.request import urlopen

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS / "extensions")]

# Pages run in processes of their own, which inherit these: four virtual CPU devices, and a compiler
# that does little, because the programs are tiny. Those of the notebooks are not: see `setup`.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
_quick = os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["KERAS_BACKEND"] = "jax"
os.environ["PYTHONPATH"] = str(ROOT)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(DOCS / "_build" / "compiled")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# Pictures of the notebooks have the style of the gallery, and twice as many pixels.
_style = (DOCS / "gallery" / "jaxloss.mplstyle").read_text(encoding="utf-8")
_matplotlibrc = DOCS / "_build" / "matplotlibrc"
_matplotlibrc.parent.mkdir(exist_ok=True)
_matplotlibrc.write_text(_style.replace("figure.dpi: 100", "figure.dpi: 200"), encoding="utf-8")
os.environ["MATPLOTLIBRC"] = str(_matplotlibrc)

# Kernels on this machine need no encryption, and do not warn of it.
_kernel = DOCS / "_build" / "ipython" / "profile_default" / "ipython_kernel_config.py"
_kernel.parent.mkdir(parents=True, exist_ok=True)
_kernel.write_text("get_config().IPKernelApp.log_level = 40\n", encoding="utf-8")
os.environ["IPYTHONDIR"] = str(_kernel.parents[1])

import jaxloss  # noqa: E402

project = "jaxloss"
author = "the jaxloss contributors"
copyright = f"2026, {author}"
version = release = jaxloss.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "myst_nb",  # It includes myst_parser.
    "sphinx_gallery.gen_gallery",
    "sphinxcontrib.bibtex",
    "docstrings",
    "gallery_style",
    "repository_pages",
]
exclude_patterns = [
    "_build",
    "gallery",
    "auto_gallery/*.ipynb",  # Downloads of the gallery, not pages.
    "auto_gallery/backreferences",
    "auto_gallery/sg_execution_times.rst",
    "extensions",
]
nitpicky = True
smartquotes_action = "D"  # Dashes alone: quotes are those of `help`.
suppress_warnings = ["config.cache"]  # The settings of sphinx-gallery hold functions.

# Names of other packages are code; links, if this is set and the lists of their names are there.
intersphinx_mapping = {}
nitpick_ignore_regex = [("py:obj", r"(jax|flax|optax)\..*")]
if os.environ.get("JAXLOSS_LINK_OTHERS"):
    extensions.append("sphinx.ext.intersphinx")
    for _name, _site in {
        "jax": "https://docs.jax.dev/en/latest/",
        "flax": "https://flax.readthedocs.io/en/stable/",
        "optax": "https://optax.readthedocs.io/en/stable/",
    }.items():
        try:
            urlopen(f"{_site}objects.inv", timeout=10).close()
            intersphinx_mapping[_name] = (_site, None)
        except OSError as error:
            print(f"no links to {_name}: {error}")

# Markdown and code on the pages ----

myst_enable_extensions = [
    "amsmath",
    "attrs_block",
    "attrs_inline",
    "colon_fence",
    "deflist",
    "dollarmath",
]
myst_heading_anchors = 4
myst_dmath_double_inline = True

# A cached page is run again when its own code or the library changes.
_sources = sorted([*(ROOT / "jaxloss").rglob("*.py"), ROOT / "experiments" / "run.py"])
_library = hashlib.sha256(b"".join(path.read_bytes() for path in _sources)).hexdigest()[:12]
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS / "_build" / "executed" / _library)
nb_execution_timeout = 600
nb_execution_show_tb = True  # A failure is a warning, and a warning an error at the end.
nb_merge_streams = True
nb_render_markdown_format = "myst"

# Docstrings ----

autodoc_preserve_defaults = True
autodoc_typehints = "none"  # The shapes are in the text.
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"  # Contents has the function beside its heading.
add_function_parentheses = False
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_use_admonition_for_examples = False

# Bibliography ----

bibtex_bibfiles = ["refs.bib"]
bibtex_default_style = "unsrt"
bibtex_reference_style = "author_year"

# Gallery ----

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "backreferences_dir": "auto_gallery/backreferences",
    "doc_module": ("jaxloss",),
    "inspect_global_variables": False,
    "filename_pattern": r"/plot_",
    "download_all_examples": False,
    "image_srcset": ["2x"],
    "thumbnail_size": (640, 400),
    "matplotlib_animations": (True, "jshtml"),
    "min_reported_time": 60,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "reset_modules": ("matplotlib", "gallery_style.use_style"),
    "within_subsection_order": "FileNameSortKey",
}

# Pages ----

html_theme = "sphinx_book_theme"
html_title = "jaxloss"
html_favicon = "logo.svg"
html_baseurl = "https://jaxloss.github.io/jaxloss/"
html_theme_options = {
    "logo": {"image_light": "logo.svg", "image_dark": "logo.svg", "text": "jaxloss"},
    "repository_url": "https://github.com/jaxloss/jaxloss",
    "repository_branch": "main",
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_issues_button": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
}
html_search_scorer = str(DOCS / "_static" / "scorer.js")
html_copy_source = False
html_show_sourcelink = False

# Formulas are set by a MathJax that is a part of the site: no page needs a network.
_mathjax = [file for file in files("sphinx-mathjax-offline") or () if file.name == "tex-svg.js"]
html_static_path = ["_static", str(_mathjax[0].locate())]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
mathjax_path = "tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}, "svg": {"fontCache": "global"}}


def choose_compilation(app, docname, source):
    """Notebooks train networks, so that it pays to optimise their programs."""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0" if "notebooks/" in docname else _quick


def link_names(app, docname, source):
    """Names in backticks are links: those of other packages, and of this one in tables of names."""
    if str(app.env.doc2path(docname)).endswith(".md"):
        own = "|".join(jaxloss.__all__) if docname == "known_as" else "(?!)"
        names = rf"`(?:((?:{'|'.join(intersphinx_mapping) or '(?!)'})\.[\w.]+)|({own}))`"
        source[0] = re.sub(
            rf"(?ms)^(?:```.*?^```|#.*?$)|(?<![\w`\[}}]){names}(?![`\]])",
            lambda m: f"{{py:obj}}`{m[1] or '~jaxloss.' + m[2]}`" if m[1] or m[2] else m[0],
            source[0],
        )


def write_llms(app, exception):
    """Writes llms.txt, the site in a page for programs: a text, and the rows of known_as.md."""
    if exception is None:
        text = (DOCS / "llms.txt").read_text(encoding="utf-8")
        table = (DOCS / "known_as.md").read_text(encoding="utf-8")
        for row in re.findall(r"^\| ({index}.*) \|.*\|$", table, flags=re.MULTILINE):
            row = re.sub(r"{index}`!(.*?)`|\[(.*?)\]\(.*?\)", r"\1\2", row)
            text += f"- {row.replace(' | ', ': ', 1)}\n"
        Path(app.outdir, "llms.txt").write_text(text, encoding="utf-8")


def mark_resolution(app, pagename, templatename, context, doctree):
    """Pictures of results and notebooks have two pixels to a point."""
    if "body" in context:
        picture = r'src="([^"]*_images/[^"]*(?<!_thumb)\.png)" (?!srcset)'
        context["body"] = re.sub(picture, r'\g<0>srcset="\1 2x" ', context["body"])


def setup(app):
    """Connects to what happens to a page: it is read, and its code runs; it is written."""
    app.connect("source-read", choose_compilation)
    app.connect("source-read", link_names)
    # Sphinx does not store a page's entries of the search.
    app.connect("env-get-outdated", lambda *_: ["known_as"])
    app.connect("html-page-context", mark_resolution)
    app.connect("build-finished", write_llms)
