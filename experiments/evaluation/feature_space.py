"""The shape of a feature space, for pictures: principal axes, neighbours, class means.

Labels are integers [n], or [n, C] where an image has any number of labels (1, 0, or −1 where that
is unknown). Everything is computed in float64. `unit_features` also serves the negative margin.
"""

from __future__ import annotations

import numpy as np

_ELEMENTS_AT_ONCE = 2**23  # Similarities held at once: bounds the work space to about 64 MB.
_MOST_ORDERED = 400  # With more classes, the optimal order of the leaves takes minutes.


def unit_features(features: np.ndarray) -> np.ndarray:
    """Features [n, d] divided by their lengths; zero stays zero."""
    features = np.asarray(features, np.float64)
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(lengths > 0, lengths, 1)


def principal_axes(features: np.ndarray) -> np.ndarray:
    """The two directions in which features [n, d] vary most: orthonormal float64 [d, 2]."""
    features = np.asarray(features, np.float64)
    centered = features - features.mean(0)
    axes = np.linalg.eigh(centered.T @ centered)[1][:, ::-1][:, :2]
    # The sign of an eigenvector is arbitrary: the largest entry is positive.
    return axes * np.sign(axes[np.abs(axes).argmax(0), [0, 1]])


def class_membership(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Whether an image has a label: bool [n, C]."""
    labels = np.asarray(labels)
    return labels > 0 if labels.ndim == 2 else labels[:, None] == np.arange(num_classes)


def class_similarity(features: np.ndarray, membership: np.ndarray) -> np.ndarray:
    """The cosines [C, C] between the mean unit features of classes; 0 without an image."""
    means = unit_features(membership.T.astype(np.float64) @ unit_features(features))
    return np.clip(means @ means.T, -1, 1)


def class_order(similarity: np.ndarray) -> np.ndarray:
    """An order of the classes, [C], by average linkage of 1 − similarity: similar ones adjoin."""
    from scipy.cluster.hierarchy import leaves_list, linkage  # Slow to import.
    from scipy.spatial.distance import squareform

    if len(similarity) < 3:
        return np.arange(len(similarity))
    distance = np.clip(1 - (similarity + similarity.T) / 2, 0, None)
    np.fill_diagonal(distance, 0)
    optimal = len(similarity) <= _MOST_ORDERED
    tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=optimal)
    return leaves_list(tree).astype(np.int64)


def most_similar_pairs(similarity: np.ndarray, count: int) -> list[tuple[int, int]]:
    """The pairs of different classes with the largest similarity, from the most similar one."""
    rows, columns = np.triu_indices(len(similarity), 1)
    order = np.argsort(-similarity[rows, columns], kind="stable")[:count]
    return [(int(rows[k]), int(columns[k])) for k in order]


def nearest_neighbours(features: np.ndarray, queries: np.ndarray, count: int) -> np.ndarray:
    """The `count` other features [n, d], or all, with the largest cosine to each of some rows [q].

    They are int64 [q, k], from the nearest.
    """
    units, queries = unit_features(features), np.asarray(queries)
    count, found = min(count, len(units) - 1), []
    step = max(1, _ELEMENTS_AT_ONCE // len(units))
    for start in range(0, len(queries), step):
        rows = queries[start : start + step]
        similar = units[rows] @ units.T
        similar[np.arange(len(rows)), rows] = -np.inf
        # Sorting the nearest ones alone takes a tenth of the time.
        nearest = np.sort(np.argpartition(-similar, count - 1, axis=1)[:, :count], axis=1)
        order = np.argsort(-np.take_along_axis(similar, nearest, 1), axis=1, kind="stable")
        found.append(np.take_along_axis(nearest, order, 1))
    return np.concatenate(found)


def nearest_mean_predictions(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The class whose mean has the largest cosine to a feature: int64 [n].

    The mean of a feature's own class is computed without the feature. A feature that is alone in
    its class is never assigned to it. Features are [n, d], and labels [n] from 0.
    """
    units, labels = unit_features(features), np.asarray(labels)
    counts = np.bincount(labels)
    sums = np.zeros((len(counts), units.shape[1]))
    np.add.at(sums, labels, units)
    scores = units @ unit_features(sums).T
    scores[:, counts == 0] = -np.inf
    own = (units * unit_features(sums[labels] - units)).sum(1)
    scores[np.arange(len(labels)), labels] = np.where(counts[labels] > 1, own, -np.inf)
    return scores.argmax(1)
