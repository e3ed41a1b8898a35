"""The look of the gallery's pictures, for `reset_modules` of sphinx-gallery.

The examples do not set it, so that a downloaded one runs by itself. To see a single picture:

    MATPLOTLIBRC=docs/gallery/jaxloss.mplstyle python docs/gallery/plot_pairwise.py
"""

from pathlib import Path
from typing import Any

import matplotlib.style

STYLE = Path(__file__).parents[1] / "gallery" / "jaxloss.mplstyle"


def use_style(_gallery_conf: Any, _filename: Any) -> None:
    """Sets the style before each example, after sphinx-gallery has reset Matplotlib."""
    matplotlib.style.use(STYLE)
