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
    "docs/adding_a_data_set.md": "adding_a_data_set",
    "docs/adding_a_loss.md": "adding_a_loss",
    "docs/api_experiments.md": "api_experiments",
    "docs/coming_from.md": "coming_from",
    "docs/coming_from_others.md": "coming_from_others",
    "docs/devices.md": "devices",
    "docs/notebooks/index.md": "notebooks/index",
    "docs/releasing.md": "releasing",
    "experiments/BENCHMARKS.md": "experiments/benchmarks",
    "experiments/PODS.md": "experiments/pods",
    "experiments/README.md": "experiments/index",
    "experiments/RESULTS.md": "papers/index",
    "experiments/RESULTS_APPENDIX.md": "papers/appendix",
}
SECTIONS = {
    "experiments/RESULTS.md": {
        "A. ": "papers/direct_sum",
        "B. ": "papers/group_softmax",
        "C. ": "papers/dynamic_prototypes",
        "D. ": "papers/two_way",
        "E. ": "papers/negative_margin",
        "F. ": "papers/two_way",
    },
    "experiments/RESULTS_APPENDIX.md": {
        f"Protocol {letter}": f"papers/appendix_{letter.lower()}" for letter in "ABCDEF"
    },
    "experiments/BENCHMARKS.md": dict.fromkeys(
        ("On a TPU", "On a GPU", "Several devices", "What limits"), "experiments/benchmarks_devices"
    ),
}
"""Of long documents: the pages of the sections whose headings start so."""
MARKED = ("On a TPU", "Changed", "[0.1.0]")
"""Headings before which a comment `from HEADING` is put, so that pages can start or end there."""

_LINK = re.compile(r"\]\((?!\w+:)(?![^)]*\.png\))([^)#\s]*)(#[^)\s]*)?( \"[^\"]*\")?\)")
_HEADING = re.compile(r"^(#{2,4}) (.*)$", re.MULTILINE)


def _places(document: str) -> dict[str, tuple[str, str]]:
    """The page and the anchor of every heading of a long document."""
    places, page, sections = {}, PAGES[document], SECTIONS[document]
    text = (ROOT / document).read_text(encoding="utf-8")
    for level, title in _HEADING.findall(text):
        anchor = default_slugify(title)
        places[anchor] = (page, f"#{anchor}")
        if level == "##":
            page = next((p for start, p in sections.items() if title.startswith(start)), page)
            places[anchor] = (page, f"#{anchor}" if page.startswith("experiments") else "")
            if title.startswith("F. "):
                places[anchor] = (page, "#linear-evaluation")
    return places


def rewrite(app: Sphinx, path: Path, parent: str, content: list[str]):
    """Changes the text of an included document before a part of it is taken."""
    document = (Path(app.srcdir) / path).resolve().relative_to(ROOT)

    def link(match: re.Match[str]) -> str:
        file, anchor, title = match[1], match[2] or "", match[3] or ""
        target = (ROOT / document.parent / file).resolve() if file else ROOT / document
        name = target.relative_to(ROOT).as_posix()
        if name in SECTIONS and anchor:
            page, anchor = _places(name)[anchor[1:]]
        elif not file:
            return match[0]
        elif name in PAGES:
            page = PAGES[name]
        else:
            return f"]({REPOSITORY}{name}{anchor}{title})"
        return f"](/{page}.md{anchor})"

    text = _LINK.sub(link, content[0])
    if document.name == "RESULTS.md":  # Its sections are pages: their headings rise by one level.
        text = re.sub(r"^##", "#", text, flags=re.MULTILINE)
    elif document.name in ("RESULTS_APPENDIX.md", "CHANGELOG.md"):  # The same of its subsections.
        text = re.sub(r"^###", "##", text, flags=re.MULTILINE)
    for heading in MARKED:
        mark = rf"<!-- from {heading} -->\n\g<0>"
        text = re.sub(rf"^#+ {re.escape(heading)}", mark, text, count=1, flags=re.MULTILINE)
    content[0] = text


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects to the event of the directive `include`."""
    app.connect("include-read", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
