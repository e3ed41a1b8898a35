"""Documents of the repository that are pages here, too: their links lead to the pages.

The pages include the documents with the directive `include`. GitHub shows the documents as they
are, with links from file to file; on the site, a file can be a page, or several.
"""

import re
from pathlib import Path

from myst_parser.mdit_to_docutils.base import default_slugify
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/jaxloss/jaxloss/blob/main/"

PAGES = {
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "docs/api.md": "api",
    "docs/coming_from.md": "coming_from",
    "docs/coming_from_others.md": "coming_from_others",
    "docs/devices.md": "devices",
    "docs/notebooks/index.md": "notebooks/index",
    "experiments/BENCHMARKS.md": "experiments/benchmarks",
    "experiments/EARLIER_RESULTS.md": "papers/earlier_results",
    "experiments/PODS.md": "experiments/pods",
    "experiments/README.md": "experiments/index",
    "experiments/RESULTS.md": "papers/index",
    "experiments/RESULTS_APPENDIX.md": "papers/appendix",
}
SECTIONS = {
    "A": "papers/direct_sum",
    "B": "papers/group_softmax",
    "C": "papers/dynamic_prototypes",
    "D": "papers/two_way",
    "E": "papers/negative_margin",
    "F": "papers/two_way",
}
"""The pages of the sections of RESULTS.md, by the letter of their heading."""

_LINK = re.compile(r"\]\((?!\w+:)(?![^)]*\.png\))([^)#\s]*)(#[^)\s]*)?\)")
_HEADING = re.compile(r"^(#{2,4}) (.*)$", re.MULTILINE)


def _results() -> dict[str, tuple[str, str]]:
    """The page and the anchor of every heading of RESULTS.md."""
    places, page = {}, PAGES["experiments/RESULTS.md"]
    text = (ROOT / "experiments/RESULTS.md").read_text(encoding="utf-8")
    for level, title in _HEADING.findall(text):
        anchor = default_slugify(title)
        if level == "##":
            page = SECTIONS[title[0]]
            places[anchor] = (page, "#linear-evaluation" if title[0] == "F" else "")
        else:
            places[anchor] = (page, f"#{anchor}")
    return places


def rewrite(app: Sphinx, path: Path, parent: str, content: list[str]):
    """Changes the text of an included document before a part of it is taken."""
    document = (Path(app.srcdir) / path).resolve().relative_to(ROOT)
    results = _results()

    def link(match: re.Match[str]) -> str:
        file, anchor = match[1], match[2] or ""
        target = (ROOT / document.parent / file).resolve() if file else ROOT / document
        name = target.relative_to(ROOT).as_posix()
        if name == "experiments/RESULTS.md" and anchor:
            page, anchor = results[anchor[1:]]
        elif not file:
            return match[0]
        elif name in PAGES:
            page = PAGES[name]
        else:
            return f"]({REPOSITORY}{name}{anchor})"
        return f"](/{page}.md{anchor})"

    text = _LINK.sub(link, content[0])
    if document.name == "RESULTS.md":  # Its sections are pages: their headings rise by one level.
        text = re.sub(r"^##", "#", text, flags=re.MULTILINE)
    content[0] = text


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects to the event of the directive `include`."""
    app.connect("include-read", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
