"""Checks every link of the built site to the site itself: the file and the anchor must exist.

Sphinx checks the references that it resolves; this checks what is in the pages at the end, such as
links of the theme, images and hand-written HTML.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of a page and its links, with their lines."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects ids, names, and what a tag points to."""
        attributes = dict(attrs)
        self.anchors |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        target = attributes.get("href") or attributes.get("src")
        if target and "preconnect" not in (attributes.get("rel") or ""):
            self.links.append((self.getpos()[0], tag, target))


def broken_links(site: Path) -> list[str]:
    """One line for each link that leads nowhere, and each file that a page takes from a network."""
    paths = (path for path in site.rglob("*.html") if "_static" not in path.parts)
    pages = {path: Page(path) for path in sorted(paths)}
    broken = []
    for path, page in pages.items():
        for line, tag, link in page.links:
            parts = urlsplit(link)
            place = f"{path.relative_to(site)}:{line}: {link}"
            if parts.scheme or parts.netloc:
                if tag in ("script", "img", "iframe") and parts.scheme != "data":
                    broken.append(f"{place} (from a network)")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(parts.fragment)
            has_anchor = not anchor or target not in pages or anchor in pages[target].anchors
            if not (target.is_file() and has_anchor):
                broken.append(place)
    return broken


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]).resolve())
    print("\n".join(found) or "All links within the site lead somewhere.")
    sys.exit(bool(found))
