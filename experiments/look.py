"""Pictures of what a run did to the feature space, from its checkpoint to one page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jaxloss
from experiments.config import Folders, TrainConfig
from experiments.contracts import ImageSet, Outputs, Protocol
from experiments.data.sampling import evaluation_episodes
from experiments.errors import ConfigError
from experiments.evaluation.classification import (
    calibration,
    class_accuracies,
    predict_classes,
    softmax_confidences,
)
from experiments.evaluation.feature_space import (
    class_means,
    class_membership,
    class_order,
    class_similarity,
    most_similar_pairs,
    nearest_mean_predictions,
    nearest_neighbours,
    neighbour_precision,
    principal_axes,
    unit_features,
)
from experiments.evaluation.few_shot import episode_accuracies
from experiments.evaluation.fine_tuning import fine_tuned_accuracies
from experiments.evaluation.hard_episodes import (
    HardEpisode,
    fine_tuned_predictions,
    hardest_episodes,
    prototype_predictions,
)
from experiments.evaluation.multilabel import average_precisions
from experiments.evaluation.subspace import span_shares
from experiments.protocols import classification
from experiments.protocols.few_shot import FewShotConfig
from experiments.protocols.hyperspherical import HypersphericalConfig, calibrated_logits
from experiments.protocols.integration import terms
from experiments.protocols.negative_margin import NegativeMarginConfig
from experiments.reporting.look.classes import (
    Bars,
    Matrix,
    Shown,
    accuracy_figure,
    similarity_figure,
)
from experiments.reporting.look.episodes import Episode, episodes_figure
from experiments.reporting.look.maps import CLASS_COLORS, Cloud, Panel, map_figure
from experiments.reporting.look.neighbours import Row, neighbours_figure
from experiments.reporting.look.page import Picture, Table, write_page
from experiments.reporting.look.reliability import reliability_figure
from experiments.reporting.look.spectrum import overlap_figure, spectrum_figure
from experiments.reporting.look.tiles import OTHERS, TRAINED, is_dark_on_light
from experiments.reporting.look.training import assignment_figure, curves_figure, log_series
from experiments.runs import RestoredRun, describe_run, restore_run, run_directory
from experiments.training.outputs import build_outputs

NEIGHBOURS = 8
"""Neighbours of a query."""
QUERIES = 14
"""Queries, each of another class."""
MOST_IMAGES = 10_000
"""Images of a split whose features are computed; of a larger split, a random part."""

_CLASSES = len(CLASS_COLORS)
_PAIRS = 5
_WORST = 10
_EPISODES = 4
_BINS = 15
_POWERS = (0.1, 0.2, 0.3, 0.5, 1.0)
"""Exponents of the curves of Fig. A."""
_OVERLAPS = (0.05, *(k / 10 for k in range(1, 11)))
_LONG_TAIL = 10
"""Ratio of the largest to the smallest class from which training images are drawn, too."""
_NOT_DRAWN = ("images_per_second", "reassigned", "alignment")
"""In the metrics log: not about the features, or in another picture."""


class Side(NamedTuple):
    """The images of one split, and what the run computes for them."""

    split: str
    images: ImageSet
    outputs: Outputs
    available: int
    """Images of the whole split."""
    inverted: bool
    """Whether images are drawn as their negatives: see `tile`."""

    def read(self, rows: Any) -> np.ndarray:
        """The images uint8 [..., h, w, c] of rows of any shape, as they are drawn."""
        rows = np.asarray(rows)
        images = self.images.images[rows.ravel()]
        images = images.reshape(*rows.shape, *images.shape[1:])
        return 255 - images if self.inverted else images

    @property
    def is_multi_label(self) -> bool:
        """Whether an image has any number of labels."""
        return self.outputs.labels.ndim == 2

    @property
    def noun(self) -> str:
        """What its classes are called."""
        return "labels" if self.is_multi_label else "classes"

    @property
    def membership(self) -> np.ndarray:
        """Whether an image has a label: bool [n, C]."""
        return class_membership(self.outputs.labels, len(self.images.class_names))


class View(NamedTuple):
    """What pictures are drawn from."""

    run: RestoredRun
    folder: Path
    """Run directory."""
    shown: Side
    """The split that was asked for."""
    trained: Side | None
    """The training images; None where these are shown."""
    tiles: int
    """Largest number of tiles in a map."""
    rng_seed: int = 0

    @property
    def config(self) -> TrainConfig:
        """Options of the run."""
        return self.run.plan.config

    @property
    def protocol(self) -> Protocol:
        """Protocol of the run."""
        return self.run.plan.protocol

    @property
    def sides(self) -> list[Side]:
        """The training images, if they are another split, and the split that was asked for."""
        return [self.shown] if self.trained is None else [self.trained, self.shown]

    @property
    def holds_classes_out(self) -> bool:
        """Whether the classes of the evaluation are not those of training."""
        return "base" in self.protocol.splits

    def color(self, side: Side) -> str:
        """The colour of a split, the same in all pictures."""
        return TRAINED if side.split == self.protocol.splits[0] else OTHERS

    def rng(self, picture: int) -> np.random.Generator:
        """What a picture chooses by: the same in every call."""
        return np.random.default_rng([self.rng_seed, picture])


def look_at_run(
    path: Path,
    folders: Folders,
    *,
    split: str | None = None,
    which: str = "best",
    images: int = 300,
    command: str = "",
) -> list[Path]:
    """Draws every picture that applies to a run, and writes them with a page that has them all.

    Args:
      path, which: The run and its checkpoint, as in `restore_run`.
      folders: Where data is stored.
      split: One of the protocol's splits; by default the one for evaluation.
      images: Largest number of images in a map.
      command: The command, for the page.

    Returns:
      The written files: the page, the numbers of the pictures, the pictures.

    Raises:
      CheckpointError: There is no such checkpoint, or none is intact.
      ConfigError: There is no such split, or `images` is below 1.
      DivergedError: The features are not finite.
    """
    if images < 1:
        raise ConfigError(f"images must be at least 1, got {images}")
    run = restore_run(path, which)
    protocol = run.plan.protocol
    wanted = split or protocol.splits[-1]
    if wanted not in protocol.splits:
        raise ConfigError(
            f"protocol {run.plan.config.protocol} has no split {wanted!r}; it has "
            f"{', '.join(protocol.splits)}"
        )
    folder = run_directory(path)
    view = _view(run, folder, folders, wanted, images)
    pictures, notes = _pictures(view)
    given = [] if wanted == protocol.splits[-1] else [wanted]
    given += [] if which == "best" else [f"step{run.step}"]
    described = describe_run(run.plan.config, protocol)
    return write_page(
        folder / "-".join(["look", *given]),
        title=f"{described['label']} on {described['data']}",
        summary=_summary(view, described),
        pictures=pictures,
        notes=[*notes, *run.notes, _version(described)],
        command=command,
    )


def _view(run: RestoredRun, folder: Path, folders: Folders, split: str, tiles: int) -> View:
    outputs_of = build_outputs(
        run.network.graphdef, run.network.objective, run.plan.config.data, run.class_counts
    )

    def side(split: str) -> Side:
        whole = run.plan.protocol.load(folders, split)
        part = _part(whole)
        some = np.linspace(0, len(part.labels) - 1, min(100, len(part.labels))).astype(int)
        dark = is_dark_on_light(part.images[some])
        return Side(split, part, outputs_of(run.state, part), len(whole.labels), dark)

    trained_on = run.plan.protocol.splits[0]
    trained = None if split == trained_on else side(trained_on)
    return View(run, folder, side(split), trained, tiles)


def _part(images: ImageSet) -> ImageSet:
    count = len(images.labels)
    if count <= MOST_IMAGES:
        return images
    rows = np.sort(np.random.default_rng(0).permutation(count)[:MOST_IMAGES])
    return ImageSet(_Rows(images.images, rows), images.labels[rows], images.class_names)


class _Rows:
    """Some images of a table; reads them when they are indexed."""

    def __init__(self, table: Any, rows: np.ndarray):
        self._table, self._rows = table, rows
        self.shape = (len(rows), *table.shape[1:])
        self.dtype = table.dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._table[self._rows[index]]


def _pictures(view: View) -> tuple[list[Picture], list[str]]:
    """Every picture that applies, and sentences on those that cannot be drawn."""
    pictures, notes = [], []
    for side in view.sides:
        count = len(side.images.labels)
        if count < side.available:
            notes.append(
                f"The {side.split} split has {side.available:,} images; pictures show a random "
                f"part of {count:,}."
            )
    for draw in _DRAWN:
        try:
            picture = draw(view)
        except ConfigError as error:
            notes.append(f"A picture is missing: {error}.")
            continue
        if picture is not None:
            pictures.append(picture)
    return pictures, notes


def _summary(view: View, described: Mapping[str, Any]) -> str:
    sides = " and ".join(
        f"{len(side.images.labels):,} {side.split} images ({len(side.images.class_names)} "
        f"{side.noun})"
        for side in view.sides
    )
    return (
        f"Features of {sides}, d = {view.run.plan.num_features}, checkpoint of step "
        f"{view.run.step}, {described['sampling']} batches, seed {described['seed']}."
    )


def _version(described: Mapping[str, Any]) -> str:
    commit = f", commit {described['commit']}" if described["commit"] else ""
    return f"jaxloss {described['version']}{commit}"


# --- Maps ---------------------------------------------------------------------------------------


def _overview(view: View) -> Picture:
    """All features on their two principal axes."""
    units = [unit_features(side.outputs.features) for side in view.sides]
    together = np.concatenate(units)
    projection = principal_axes(together)
    shares = projection.shares(together)
    clouds = []
    for number, (side, features) in enumerate(zip(view.sides, units, strict=True)):
        rows = view.rng(number).permutation(len(features))
        points = projection.points(features[rows])
        clouds.append(Cloud(f"{side.split} images", points, partial(_read, side, rows)))
    title = "Map of the features"
    caption = (
        "Features of length one on their two principal axes; a dot is an image, and some have "
        "their image drawn in place. Read it by regions: images that look or mean alike should be "
        "near each other, and a split that fills its own region has other features."
    )
    figure, drawn = map_figure(
        [Panel("", clouds, (float(shares[0]), float(shares[1])))],
        title=title,
        caption=caption,
        colors=[view.color(side) for side in view.sides],
        legends=False,
        size=8.6,
        tiles=view.tiles,
    )
    numbers = {"variance_shares": shares.tolist(), "images_drawn": drawn[0]}
    return Picture("map", title, caption, figure, numbers)


def _read(side: Side, rows: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The images of some points, of which each is a row of the side."""
    return side.read(rows[points])


def _class_map(view: View) -> Picture | None:
    """A few classes of every split, on the axes along which their means differ most."""
    panels, numbers = [], {}
    same = None if view.holds_classes_out else _few_classes(view.shown)
    for number, side in enumerate(view.sides):
        classes = _few_classes(side) if same is None else same
        own = _only_members(side, classes)
        if sum(len(rows) > 0 for rows in own) < 3:
            return None
        units = unit_features(side.outputs.features[np.concatenate(own)])
        parts = np.split(units, np.cumsum([len(rows) for rows in own])[:-1])
        projection = principal_axes(np.stack([part.mean(0) for part in parts if len(part)]))
        shares = projection.shares(units)
        clouds = []
        for label, rows, part in zip(classes, own, parts, strict=True):
            order = view.rng(10 + number).permutation(len(rows))
            points = projection.points(part[order])
            name = side.images.class_names[label]
            clouds.append(Cloud(name, points, partial(_read, side, rows[order])))
        title = f"{len(classes)} {side.noun} of the {side.split} images"
        panels.append(Panel(title, clouds, (float(shares[0]), float(shares[1])), "axis"))
        numbers[side.split] = {
            "classes": [side.images.class_names[c] for c in classes],
            "variance_shares": shares.tolist(),
        }
    noun = view.shown.noun
    title = f"Map of a few {noun}"
    caption = (
        f"Images of a few {noun}, spread over the order of the similarity matrix, on the two axes "
        "along which the means of these differ most. Compact groups of one colour that do not mix "
        "are easy to classify."
    )
    if view.shown.is_multi_label:
        caption += f" Only images with exactly one of these {noun} are drawn."
    figure, drawn = map_figure(
        panels,
        title=title,
        caption=caption,
        colors=CLASS_COLORS,
        legends=True,
        size=6.4 if len(panels) == 1 else 5.6,
        tiles=view.tiles,
    )
    for side, count in zip(view.sides, drawn, strict=True):
        numbers[side.split]["images_drawn"] = count
    return Picture("class-map", title, caption, figure, numbers)


def _few_classes(side: Side) -> np.ndarray:
    """Classes of the larger half, spread over the order of the similarity matrix."""
    counts = side.membership.sum(0)
    order = _ordered_classes(side)
    order = order[counts[order] >= np.median(counts[order])]
    places = np.linspace(0, len(order) - 1, min(_CLASSES, len(order))).round().astype(int)
    return order[places]


def _only_members(side: Side, classes: np.ndarray) -> list[np.ndarray]:
    """For each of the classes, the images that belong to it and to no other of them."""
    membership = side.membership[:, classes]
    single = membership.sum(1) == 1
    return [np.flatnonzero(single & column) for column in membership.T]


def _ordered_classes(side: Side) -> np.ndarray:
    """The classes that have an image, in the order of the similarity matrix."""
    membership = side.membership
    present = np.flatnonzero(membership.any(0))
    similarity = class_similarity(side.outputs.features, membership[:, present])
    return present[class_order(similarity)]


# --- Neighbours and classes ---------------------------------------------------------------------


def _neighbours(view: View) -> Picture | None:
    side, membership = view.shown, view.shown.membership
    if len(membership) < 3:
        return None
    rng, multi_label = view.rng(20), side.is_multi_label
    # Of another class each, as far as possible.
    order = rng.permutation(np.flatnonzero(membership.any(1)))
    _, first = np.unique(membership[order].argmax(1), return_index=True)
    queries = order[np.sort(first)[:QUERIES]]
    found = nearest_neighbours(side.outputs.features, queries, NEIGHBOURS).indices
    shared = np.asarray((membership[queries, None] & membership[found]).any(2))
    rows = []
    for query, neighbours, same in zip(queries, found, shared, strict=True):
        names = [
            _shared_text(membership[query], membership[n])
            if multi_label
            else ("" if right else _label_text(side, n))
            for n, right in zip(neighbours, same, strict=True)
        ]
        images = side.read([query, *neighbours])
        rows.append(Row(_label_text(side, query), images, names, (~same).tolist()))
    precision = neighbour_precision(side.outputs.features, membership, NEIGHBOURS)
    if multi_label:
        reading = (
            "a frame: no label in common with the query; below each, the labels in common, of all "
            "labels of the two images"
        )
        share = "share a label with it"
    else:
        reading = "a frame: another class than that of the query, named below"
        share = "have its class"
    title = f"Nearest neighbours of some {side.split} images"
    caption = (
        f"The first image of a row is a query, the others have the largest cosine to it among all "
        f"{side.split} images ({reading}). Over all images as queries, {100 * precision:.1f} % of "
        f"the {found.shape[1]} nearest neighbours {share}."
    )
    numbers = {
        "queries": queries.tolist(),
        "neighbours": found.tolist(),
        "wrong": (~shared).tolist(),
        "precision": precision,
    }
    figure = neighbours_figure(rows, title=title, caption=caption)
    return Picture("neighbours", title, caption, figure, numbers)


def _label_text(side: Side, row: int) -> str:
    names = [side.images.class_names[c] for c in np.flatnonzero(side.membership[row])]
    return ", ".join(names)


def _shared_text(one: np.ndarray, other: np.ndarray) -> str:
    return f"{int((one & other).sum())} of {int((one | other).sum())}"


def _similarity(view: View) -> Picture | None:
    matrices, numbers = [], {}
    sides = view.sides if view.holds_classes_out else [view.shown]
    pairs: list[tuple[str, str, float]] = []
    for side in sides:
        membership = side.membership
        present = np.flatnonzero(membership.any(0))
        if len(present) < 3:
            return None
        similarity = class_similarity(side.outputs.features, membership[:, present])
        order = class_order(similarity)
        names = [side.images.class_names[c] for c in present[order]]
        title = f"{len(present)} {side.noun} of the {side.split} images"
        matrices.append(Matrix(title, names, similarity[np.ix_(order, order)]))
        pairs = [
            (side.images.class_names[present[a]], side.images.class_names[present[b]], s)
            for a, b in most_similar_pairs(similarity, 20)
            for s in [float(similarity[a, b])]
        ]
        off = similarity[~np.eye(len(similarity), dtype=bool)]
        numbers[side.split] = {
            "classes": names,
            "mean_cosine": float(off.mean()),
            "most_similar": pairs,
        }
    side = sides[-1]
    typical = _typical_images(side)
    index = {name: c for c, name in enumerate(side.images.class_names)}
    shown = [
        Shown(np.stack([typical[index[a]], typical[index[b]]]), (a, b), f"{cosine:.2f}")
        for a, b, cosine in pairs[:_PAIRS]
    ]
    noun = side.noun
    title = f"Similarity of the {noun}"
    caption = (
        f"Cosine between the mean features of two {noun}, with similar {noun} side by side; the "
        f"diagonal is 1. Bright blocks are {noun} that the features hardly tell apart. Below: the "
        f"most similar pairs of {side.split} {noun}, each with a typical image and the cosine."
    )
    rows = [[a, b, f"{cosine:.3f}"] for a, b, cosine in pairs]
    table = Table(["class", "most similar class", "cosine"], rows)
    figure = similarity_figure(matrices, shown, title=title, caption=caption, classes=noun)
    return Picture("similarity", title, caption, figure, numbers, table)


def _typical_images(side: Side) -> dict[int, np.ndarray]:
    """For every class an image: the nearest to its mean; one with few labels, where it can be."""
    membership, units = side.membership, unit_features(side.outputs.features)
    cosines = units @ class_means(side.outputs.features, membership).T
    fewest = np.where(membership, membership.sum(1, keepdims=True), membership.shape[1] + 1).min(0)
    allowed = membership & (membership.sum(1, keepdims=True) == fewest)
    rows = np.where(allowed, cosines, -np.inf).argmax(0)
    present = np.flatnonzero(membership.any(0))
    images = side.read(rows[present])
    return dict(zip(present.tolist(), images, strict=True))


def _by_class(view: View) -> Picture | None:
    """How well each class is recognised."""
    if view.shown.is_multi_label:
        return _precision_by_class(view)
    if view.holds_classes_out:
        return _nearest_mean_by_class(view)
    return _accuracy_by_class(view)


def _accuracy_by_class(view: View) -> Picture:
    side, counts = view.shown, view.run.class_counts
    predictions = predict_classes(side.outputs.logits())
    result = class_accuracies(predictions, side.outputs.labels, len(counts))
    overall = float((predictions == side.outputs.labels).mean())
    long_tailed = counts.max() >= _LONG_TAIL * counts.min()
    caption = f"A bar is the accuracy on the {side.split} images of one class; the dashed line is "
    caption += "the accuracy on all images."
    if long_tailed:
        caption += (
            " Classes are sorted by their training images, which the green line shows on the right "
            "axis (logarithmic): the tail is at the right."
        )
    else:
        caption += " Classes are sorted from the best one."
    values = {side.split: (result.accuracies, overall)}
    return _bars_picture(
        view,
        [side],
        values,
        measure="accuracy (%)",
        name="accuracy",
        title="Accuracy by class",
        caption=caption,
        counts=counts if long_tailed else None,
    )


def _nearest_mean_by_class(view: View) -> Picture:
    values = {}
    for side in view.sides:
        labels = np.asarray(side.outputs.labels)
        right = nearest_mean_predictions(side.outputs.features, labels) == labels
        counts = np.bincount(labels)
        accuracies = np.bincount(labels, right) / np.maximum(counts, 1)
        values[side.split] = (np.where(counts > 0, accuracies, np.nan), float(right.mean()))
    return _bars_picture(
        view,
        view.sides,
        values,
        measure="nearest to the mean of their class (%)",
        name="accuracy",
        title="Accuracy by class, by the nearest class mean",
        caption="A bar is the share of the images of one class whose features are nearest (cosine) "
        "to the mean of that class, among all classes of the split; the mean leaves out the image "
        "itself. A dashed line is the share of all images.",
    )


def _precision_by_class(view: View) -> Picture:
    side = view.shown
    scores, targets = side.outputs.logits(), np.asarray(side.outputs.labels)
    precisions = average_precisions(scores.T, targets.T)
    return _bars_picture(
        view,
        [side],
        {side.split: (precisions, float(np.nanmean(precisions)))},
        measure="average precision (%)",
        name="precision",
        title="Average precision by label",
        caption=f"A bar is the average precision of the ranking of all {side.split} images by the "
        "logit of one label; the dashed line is their mean, mAP@class. Labels are sorted from the "
        "best one.",
    )


def _bars_picture(
    view: View,
    sides: Sequence[Side],
    values: Mapping[str, tuple[np.ndarray, float]],
    *,
    measure: str,
    name: str,
    title: str,
    caption: str,
    counts: np.ndarray | None = None,
) -> Picture:
    panels, numbers = [], {}
    for side in sides:
        of_classes, mean = values[side.split]
        by = -np.nan_to_num(of_classes, nan=-1) if counts is None else -counts
        order = np.argsort(by, kind="stable")
        order = order[~np.isnan(of_classes[order])]
        heading = f"{side.split} images"
        drawn_counts = None if counts is None else counts[order]
        panels.append(Bars(heading, of_classes[order], mean, view.color(side), drawn_counts))
        classes = [side.images.class_names[c] for c in order]
        numbers[side.split] = {
            "mean": mean,
            "classes": dict(zip(classes, of_classes[order].tolist(), strict=True)),
        }
    side = sides[-1]
    of_classes = values[side.split][0]
    # Of equal values, the class with the most training images is the most surprising.
    ties = np.zeros(len(of_classes)) if counts is None else -counts
    lowest = np.lexsort((ties, of_classes))
    lowest = lowest[~np.isnan(of_classes[lowest])]
    typical, class_names = _typical_images(side), side.images.class_names
    worst = [
        Shown(typical[c][None], (class_names[c],), f"{100 * of_classes[c]:.0f} %")
        for c in lowest[:_WORST].tolist()
    ]
    rows = [
        [class_names[c], f"{100 * of_classes[c]:.1f}"]
        + ([] if counts is None else [int(counts[c])])
        for c in lowest.tolist()
    ]
    headings = [f"class ({side.split} images)", measure]
    headings += [] if counts is None else ["training images"]
    caption += (
        f" Below: the {side.split} {side.noun} with the lowest values, each by a typical image."
    )
    figure = accuracy_figure(
        panels, worst, title=title, caption=caption, measure=measure, classes=side.noun
    )
    return Picture(name, title, caption, figure, numbers, Table(headings, rows))


# --- Classifier ---------------------------------------------------------------------------------


def _kernel(view: View) -> np.ndarray | None:
    """The weights [d, C] of a trained linear classifier; None where the run has none.

    Those of weights that are all zero span nothing, and count as none.
    """
    head = view.run.state.params["classifier"]
    if "kernel" not in head:
        return None
    config = view.config
    if isinstance(config, FewShotConfig) and terms(config.loss.name).classification is None:
        return None  # A metric loss alone does not train it.
    kernel = np.asarray(head["kernel"], np.float64)
    return kernel if kernel.any() else None


def _spectrum(view: View) -> Picture | None:
    kernel = _kernel(view)
    if kernel is None:
        return None
    sides = {s.split: span_shares(s.outputs.features, kernel) for s in view.sides}
    values = next(iter(sides.values())).singular_values
    dim = len(kernel)
    title = "The classifier's subspace"
    caption = (
        "Left: the singular values of the classifier W; few large ones mean that the logits use "
        "few directions. Right: how much of the variance of the features these directions hold, "
        "from the largest singular value on; what is missing to 100 % at the end of a curve is "
        "outside of the span of W, where the classifier does not see it."
    )
    if len(values) == dim:
        caption += (
            f" W spans all {dim} dimensions (there are {kernel.shape[1]} classes), so nothing is "
            "outside."
        )
    figure = spectrum_figure(
        values,
        [
            (f"{side.split} images", view.color(side), sides[side.split].cumulative)
            for side in view.sides
        ],
        dim=dim,
        title=title,
        caption=caption,
    )
    numbers = {
        "singular_values": values.tolist(),
        "inside": {name: shares.inside for name, shares in sides.items()},
        "rank": len(values),
    }
    return Picture("spectrum", title, caption, figure, numbers)


def _overlap(view: View) -> Picture | None:
    """Figure A of seed 000, with the classifier's own spectrum."""
    kernel, config = _kernel(view), view.config
    if kernel is None or not isinstance(config, FewShotConfig):
        return None
    weights = jnp.asarray(kernel, jnp.float32)
    values = span_shares(view.shown.outputs.features, kernel).singular_values
    overlaps = {
        power: float(jaxloss.spectral_overlap(weights, power)) / float(values[0])
        for power in _OVERLAPS
    }
    is_spectral = terms(config.loss.name).integration == "spectral"
    title = "Overlap of a spectral sum"
    caption = (
        "Left: a spectral sum gives the metric loss the weight 1 − λ̃ᵖ along a direction that the "
        "classifier uses with λ̃; the product is the overlap (Kobayashi, BMVC 2024, Fig. A), with "
        "a mark for each singular value of W. Right: its maximum over the singular values. A small "
        "p separates the two losses, but leaves the metric loss less room."
    )
    figure = overlap_figure(
        values / values[0],
        _POWERS,
        overlaps,
        used=config.loss.power if is_spectral else None,
        title=title,
        caption=caption,
    )
    numbers = {
        "relative_singular_values": (values / values[0]).tolist(),
        "overlaps": {f"{power:g}": value for power, value in overlaps.items()},
    }
    return Picture("overlap", title, caption, figure, numbers)


def _reliability(view: View) -> Picture | None:
    side = view.shown
    if view.protocol.splits != classification.SPLITS or side.is_multi_label:
        return None
    logits, scaled = side.outputs.logits(), None
    correct = predict_classes(logits) == np.asarray(side.outputs.labels)
    if isinstance(view.config, HypersphericalConfig):
        scaled = calibrated_logits(view.config, side.outputs)
    confidences = softmax_confidences(logits if scaled is None else scaled)
    result = calibration(confidences, correct, bins=_BINS)
    title = "Reliability diagram"
    caption = (
        f"Accuracy on the {side.split} images against their confidence, in {_BINS} bins of equal "
        "width. Bars below the dashed line: the model is too confident; above it: not confident "
        "enough. Bins with few images, as the lower panel shows, are noisy."
    )
    figure = reliability_figure(
        result.counts,
        result.confidences,
        result.accuracies,
        error=result.error,
        title=title,
        caption=caption,
    )
    used = result.counts > 0
    numbers = {
        "calibration_error": result.error,
        "counts": result.counts.tolist(),
        "accuracies": [
            float(a) if u else None for a, u in zip(result.accuracies, used, strict=True)
        ],
    }
    return Picture("reliability", title, caption, figure, numbers)


# --- Episodes and training ----------------------------------------------------------------------


def _hard_episodes(view: View) -> Picture | None:
    side, config = view.shown, view.config
    if not isinstance(config, FewShotConfig | NegativeMarginConfig):
        return None
    options = config.evaluation
    shots = min(options.shots)
    episodes = evaluation_episodes(
        side.outputs.labels,
        num_episodes=options.episodes,
        ways=options.ways,
        shots=shots,
        queries=options.queries,
        seed=options.seed,
    )
    accuracies, predict, how = _episode_classifier(view, episodes)
    hardest = hardest_episodes(accuracies, episodes, predict, count=_EPISODES)
    names = side.images.class_names
    drawn = [_episode(side, episode) for episode in hardest]
    title = f"The hardest {shots}-shot episodes"
    caption = (
        f"The {len(hardest)} of {options.episodes:,} episodes of {side.split} classes with the "
        f"lowest accuracy, classified by {how}; the mean accuracy is "
        f"{100 * accuracies.mean():.1f} %. A row is a class: its name, the support images in the "
        "colour of the class, then up to ten queries, the wrong ones first. The frame and the "
        "number of a wrong query are those of the class that it was taken for; +3 stands for three "
        "more wrong ones."
    )
    figure = episodes_figure(drawn, title=title, caption=caption)
    numbers = {
        "mean_accuracy": float(accuracies.mean()),
        "episodes": [
            {
                "number": episode.number,
                "accuracy": episode.accuracy,
                "classes": [names[side.outputs.labels[row]] for row in episode.support[:, 0]],
                "support": episode.support.tolist(),
                "query": episode.query.tolist(),
                "predictions": episode.predictions.tolist(),
            }
            for episode in hardest
        ],
    }
    return Picture("episodes", title, caption, figure, numbers)


def _episode_classifier(
    view: View, episodes: Any
) -> tuple[np.ndarray, Callable[[int], np.ndarray], str]:
    """The accuracy of every episode, the predictions in one of them, and by what."""
    features, config = view.shown.outputs.features, view.config
    if isinstance(config, NegativeMarginConfig):
        settings, seed = config.fine_tuning, config.evaluation.seed
        classifier = view.protocol.description["evaluation"]["classifier"]
        accuracies = fine_tuned_accuracies(
            features, episodes, classifier=classifier, settings=settings, seed=seed
        )

        def tuned(e: int) -> np.ndarray:
            return fine_tuned_predictions(
                features,
                episodes.support[e],
                episodes.query[e],
                classifier=classifier,
                settings=settings,
                seed=seed,
                episode=e,
            )

        return accuracies, tuned, f"a fine-tuned {classifier} classifier"
    assert isinstance(config, FewShotConfig)
    distance = config.evaluation.distances[0]

    def nearest(e: int) -> np.ndarray:
        return prototype_predictions(
            features, episodes.support[e], episodes.query[e], distance=distance
        )

    accuracies = episode_accuracies(features, episodes, distance=distance)
    return accuracies, nearest, f"the nearest prototype ({distance})"


def _episode(side: Side, episode: HardEpisode) -> Episode:
    names = [side.images.class_names[side.outputs.labels[row]] for row in episode.support[:, 0]]
    title = f"Episode {episode.number}: {100 * episode.accuracy:.0f} % of the queries right"
    support, queries = side.read(episode.support), side.read(episode.query)
    return Episode(title, names, support, queries, episode.predictions)


def _assignment(view: View) -> Picture | None:
    state = view.run.state.objective_state
    if not isinstance(state, Mapping) or "reassigned" not in state:
        return None
    reassigned = np.asarray(state["reassigned"])
    done = reassigned >= 0
    if not done.any():
        return None
    alignment = np.asarray(state["alignment"], np.float64)[done]
    classes = len(view.run.class_counts)
    title = "Movement of the assignment"
    caption = (
        "Bars: how many classes received another prototype after an epoch (the dotted line is all "
        "of them). Line: the cosine between class means and their prototypes, averaged over the "
        "classes. The assignment has settled where bars vanish while the line still rises."
    )
    figure = assignment_figure(
        reassigned[done], alignment, classes=classes, title=title, caption=caption
    )
    numbers = {"reassigned": reassigned[done].tolist(), "alignment": alignment.tolist()}
    return Picture("assignment", title, caption, figure, numbers)


def _curves(view: View) -> Picture | None:
    path = view.folder / "metrics.jsonl"
    if not path.exists():
        return None
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    series = log_series(rows, without=_NOT_DRAWN)
    if not series:
        return None
    title = "Training"
    caption = (
        "The numbers of the metrics log against the training step; those of training are of single "
        f"batches, with augmentation. The dotted line is the checkpoint shown here, step "
        f"{view.run.step}."
    )
    figure = curves_figure(
        series, view.protocol.validation, checkpoint=view.run.step, title=title, caption=caption
    )
    last = {name: float(values[-1]) for name, (_, values) in series.items()}
    numbers = {name: value if np.isfinite(value) else None for name, value in last.items()}
    return Picture("training", title, caption, figure, {"last": numbers})


_DRAWN: Sequence[Callable[[View], Picture | None]] = (
    _overview,
    _class_map,
    _neighbours,
    _similarity,
    _by_class,
    _hard_episodes,
    _spectrum,
    _overlap,
    _assignment,
    _reliability,
    _curves,
)
"""Every picture in the order of the page; None where it does not apply."""
