"""The look of the gallery: the style of its pictures, for `reset_modules` of sphinx-gallery, and of
its pages, on which each picture stands before its code, which is folded.

The examples do not set it, so that a downloaded one runs by itself. To see a single picture:

    MATPLOTLIBRC=docs/gallery/jaxloss.mplstyle python docs/gallery/plot_pairwise.py
"""

import re
from pathlib import Path
from typing import Any

import matplotlib.style
from sphinx.application import Sphinx

STYLE = Path(__file__).parents[1] / "gallery" / "jaxloss.mplstyle"


def use_style(_gallery_conf: Any, _filename: Any) -> None:
    """Sets the style before each example, after sphinx-gallery has reset Matplotlib."""
    matplotlib.style.use(STYLE)


_CODE = re.compile(
    r"^(\.\. code-block:: Python\n(?:    .*\n|\n)+)((?:\.\. image-sg::.*\n(?:   .*\n|\n)+)*)",
    re.MULTILINE,
)
_FOLDED = """{pictures}.. raw:: html

   <details class="code"><summary>Code{of}</summary>

{code}.. raw:: html

   </details>

"""


def fold_code(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Moves the pictures of a page of the gallery before their code, and folds the code."""
    if docname.startswith("auto_gallery/plot_"):
        source[0] = _CODE.sub(
            lambda match: _FOLDED.format(
                pictures=match[2], of=" of this picture" * bool(match[2]), code=match[1]
            ),
            source[0],
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Pages are changed as they are read; sphinx-gallery has written them by then."""
    app.connect("source-read", fold_code)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
