"""What a classifier takes for something else: single images, and pairs of classes."""

from __future__ import annotations

from pathlib import PurePath

import numpy as np

from experiments.evaluation.classification import softmax_confidences
from experiments.look.page import Picture, Tile, draw_rows, short
from experiments.look.view import View
from experiments.reporting.style import VERMILLION

_IMAGES, _COLUMNS = 48, 8
_CLASSES = 30  # In a confusion matrix; of more, those that are confused most.


def wrong_images(view: View) -> Picture | None:
    """The images that are taken for another class; None without one, or without a classifier."""
    (side, outputs), names = (view.shown, view.shown.outputs), view.shown.outputs.class_names
    if view.holds_classes_out or side.is_multi_label:
        return None
    labels, logits = outputs.labels, outputs.logits()
    found, confidences = logits.argmax(1), softmax_confidences(logits)
    if not len(wrong := np.flatnonzero(found != labels)):
        return None
    wrong = wrong[np.argsort(-confidences[wrong], kind="stable")]
    numbers = {
        "rows": wrong.tolist(),
        "classes": side.names_of(labels[wrong]),
        "predicted": side.names_of(found[wrong]),
        "files": [] if outputs.files is None else outputs.files[wrong].tolist(),
    }
    tiles = []
    for row, image in zip(wrong, outputs.images(wrong[:_IMAGES]), strict=False):
        note = f"{short(names[labels[row]], 26)}\n→ {short(names[found[row]], 24)}"
        if outputs.files is not None:
            note = f"{short(PurePath(str(outputs.files[row])).name, 26)}\n{note}"
        tiles += [Tile(image, VERMILLION, note), Tile()]
    rows = [("", tiles[i : i + 2 * _COLUMNS]) for i in range(0, len(tiles), 2 * _COLUMNS)]
    picture = Picture(
        "mistakes",
        f"Wrong {side.split} images",
        f"{len(wrong):,} of {len(found):,} {side.split} images are taken for another class. Shown: "
        f"at most {_IMAGES}, the most confident first, with their class → what was predicted.",
        (13.0, 1.5 * len(rows) + 0.3),
        numbers,
    )
    draw_rows(picture.figure.subplots(), rows, "class → predicted class")
    return picture


def confusion(view: View) -> Picture | None:
    """How often a class is taken for each other one; None without a classifier."""
    side, count = view.shown, len(view.shown.outputs.class_names)
    if view.holds_classes_out or side.is_multi_label:
        return None
    table = np.zeros((count, count), np.int64)
    np.add.at(table, (side.outputs.labels, side.outputs.logits().argmax(1)), 1)
    mistakes = table.sum(0) + table.sum(1) - 2 * table.diagonal()
    chosen = np.sort(np.argsort(-mistakes, kind="stable")[:_CLASSES])
    names, counts = side.names_of(chosen), table[np.ix_(chosen, chosen)]
    shares = 100 * counts / np.maximum(table[chosen].sum(1, keepdims=True), 1)
    picture = Picture(
        "confusion",
        "Confusion matrix",
        f"Of the {side.split} images of a class (a row), per cent that are taken for each one; "
        f"at most {_CLASSES} classes, those that are confused most.",
        (9.6, 8.4),
        {"classes": names, "counts": counts.tolist()},
    )
    axes, font = picture.figure.subplots(), min(9, 270 / len(names))
    axes.imshow(shares, cmap="cividis", vmin=0, vmax=100)
    ticks = [short(name, 28) for name in names]
    axes.set_yticks(range(len(names)), ticks, fontsize=font)
    axes.set_xticks(range(len(names)), ticks, fontsize=font, rotation=90)
    axes.set(xlabel="predicted class", ylabel="class of the image")
    axes.grid(visible=False)
    for row, column in np.argwhere(counts):
        text, color = f"{shares[row, column]:.0f}", "k" if shares[row, column] > 50 else "w"
        axes.text(column, row, text, size=0.85 * font, c=color, ha="center", va="center")
    return picture
