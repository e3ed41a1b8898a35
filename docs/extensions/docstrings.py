"""Docstrings of `jaxloss` as they are, plus links: to functions, and to the bibliography.

A name in backticks links to the function. Every item below *References:* must name the title of an
entry of refs.bib, or its `docstring` field where the docstrings shorten the title; it then links to
the entry. `help` and the site thus have one source.
"""

import re
from pathlib import Path

from pybtex.database import parse_file
from sphinx.application import Sphinx
from sphinx.util import logging

import jaxloss

logger = logging.getLogger(__name__)

_PUBLIC = re.compile(rf"(?<![`:])`(?:jaxloss\.)?({'|'.join(jaxloss.__all__)})`(?!`)")
_CONTRACT = re.compile(r"(keywords?\s+of(?:\s+pairwise\s+losses\s+in)?\s+)`jaxloss`")


# Losses without a picture of their own, and functions whose picture shows them.
_DRAWN_BY = {
    "jaxloss.classifier_loss": "jaxloss.margin_softmax_loss",
    "jaxloss.spectral_sum_loss": "jaxloss.project_spectral_complement",
    "jaxloss.sum_loss": "jaxloss.direct_sum_loss",
}


def _titles(path: Path) -> dict[str, re.Pattern[str]]:
    """A pattern for the title of each entry, in which any space may be a line break."""
    titles = {}
    for key, entry in parse_file(path).entries.items():
        title = entry.fields.get("docstring", entry.fields["title"])
        words = re.sub(r"[{}]", "", title).split()
        titles[key] = re.compile(r"\s+".join(map(re.escape, words)))
    return titles


def _items(lines: list[str]) -> list[str]:
    """A new item starts after a line that ends in a full stop."""
    items, item = [], []
    for line in lines:
        item.append(line.strip())
        if line.rstrip().endswith("."):
            items.append(" ".join(item))
            item = []
    return items + ([" ".join(item)] if any(item) else [])


def _cited(items: list[str], titles: dict[str, re.Pattern[str]], name: str) -> list[str]:
    cited = []
    for item in items:
        keys = [key for key, title in titles.items() if title.search(item)]
        if not keys:
            logger.warning("%s: no entry of refs.bib for the reference %r", name, item)
        cited.append(f"* {item} {' '.join(f':cite:p:`{key}`' for key in keys)}")
    return cited


def _linked(lines: list[str], own: str) -> list[str]:
    text = _CONTRACT.sub(r"\1:doc:`jaxloss </contract>`", "\n".join(lines))
    text = text.replace("`jaxloss.testing.check_loss`", ":py:obj:`~jaxloss.testing.check_loss`")
    text = _PUBLIC.sub(
        lambda match: match[0] if match[1] == own else f":py:obj:`~jaxloss.{match[1]}`", text
    )
    return text.split("\n")


def _module(lines: list[str]) -> list[str]:
    """The help of the package: its headings, and the arguments below them as lists."""
    result = []
    for line in lines:
        if re.fullmatch(r"\S.*:", line):
            result += ["", f".. rubric:: {line[:-1].replace('`', '')}", ""]
        elif match := re.fullmatch(r"  (\w+): (.*)", line):
            result += ["", f"* **{match[1]}**: {match[2]}"]
        elif line.startswith("    "):
            result.append(line[2:])
        else:
            result.append(line.strip() if line.startswith("  ") else line)
    return result


def process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]):
    """Changes the lines of a docstring in place, before napoleon reads them."""
    own = name.rpartition(".")[2]
    text = list(lines)
    if "References:" in text:
        start = text.index("References:") + 1
        end = next((k for k in range(start, len(text)) if not text[k].strip()), len(text))
        titles = _titles(Path(app.srcdir) / "refs.bib")
        references = _cited(_items(text[start:end]), titles, name)
        text = text[:start] + [f"  {item}" for item in references] + text[end:]
    if what == "module":
        text = _module(text)
    # A description such as "w." would be an item of a numbered list.
    text = [re.sub(r"^(  \w[\w, ]*: )([A-Za-z])(\.( |$))", r"\1\\\2\3", line) for line in text]
    lines[:] = _linked(text, own)
    for other in getattr(app.config, "intersphinx_mapping", ()):  # See conf.py.
        name = re.compile(rf"(?<![`:])`({other}\.[\w.]+)`(?!`)")
        lines[:] = [name.sub(r":py:obj:`\1`", line) for line in lines]
    drawn = _DRAWN_BY.get(name, name)
    examples = Path(app.srcdir) / "auto_gallery" / "backreferences" / f"{drawn}.examples"
    if what == "function" and examples.is_file() and examples.stat().st_size:
        # A page shows a picture once, and then links to it.
        pictures = set(re.findall(r":doc:`\S+`", examples.read_text(encoding="utf-8")))
        shown = app.env.temp_data.setdefault("pictures", set())
        links = " · ".join(sorted(pictures))
        gallery = f".. minigallery:: {drawn}" if pictures - shown else links
        lines += ["", ".. rubric:: Pictures", "", gallery, ""]
        shown |= pictures


def list_public_names(app: Sphinx, docname: str, source: list[str]):
    """Fills the table of the API page."""
    names = "\n".join(f"   ~jaxloss.{name}" for name in jaxloss.__all__)
    table = f".. autosummary::\n   :nosignatures:\n\n{names}\n   ~jaxloss.testing.check_loss"
    source[0] = source[0].replace("```{public-names}", f"```{{eval-rst}}\n{table}")


def check_that_all_are_documented(app: Sphinx, env):
    """Every public name has a place on the site."""
    documented = set(env.domaindata["py"]["objects"])
    rooms = {"pairs": jaxloss.pairs, "sampling": jaxloss.sampling}
    inner = (f"{room}.{name}" for room, module in rooms.items() for name in module.__all__)
    every = [*jaxloss.__all__, *inner]
    for name in every:
        if f"jaxloss.{name}" not in documented:
            logger.warning("jaxloss.%s is on no page", name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Runs before napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("source-read", list_public_names)
    app.connect("env-check-consistency", check_that_all_are_documented)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
