"""The hardest few-shot episodes of an evaluation."""

from __future__ import annotations

from functools import partial

import numpy as np

from experiments.contracts import EpisodeClassifier
from experiments.evaluation.hard_episodes import HardEpisode, hardest_episodes
from experiments.look.view import Side, View
from experiments.reporting.look.episodes import Episode, episodes_figure
from experiments.reporting.look.page import Picture
from experiments.reporting.run import read_episodes, read_report
from experiments.restored import describe_run

_EPISODES = 4
_OF_THE_CODE = ("version", "commit")
"""What a report states of the code, not of the run."""


def hard_episodes(view: View) -> Picture | None:
    """The episodes with the lowest accuracy; None where the evaluation has no episodes."""
    side, classifier = view.shown, view.protocol.episode_classifier
    if classifier is None:
        return None
    features, shots = side.outputs.features, classifier.shots
    episodes = classifier.episodes(side.outputs.labels)
    accuracies = _stored_accuracies(view, classifier)
    if accuracies is None:
        accuracies = classifier.accuracies(features, episodes)
    predict = partial(classifier.predictions, features, episodes)
    hardest = hardest_episodes(accuracies, episodes, predict, count=_EPISODES)
    names = side.images.class_names
    drawn = [_episode(side, episode) for episode in hardest]
    title = f"The hardest {shots}-shot episodes"
    caption = (
        f"The {len(hardest)} of {len(accuracies):,} episodes of {side.split} classes with the "
        f"lowest accuracy, classified by {classifier.name}; the mean accuracy is "
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


def _stored_accuracies(view: View, classifier: EpisodeClassifier) -> np.ndarray | None:
    """The accuracies of the run's report: float32 [E].

    None where there is no report, or one of another checkpoint, split or evaluation.
    """
    file = view.folder / "report.json"
    report = read_report(file) if file.exists() else None
    if report is None:
        return None
    shown = {"step": view.run.step, "split": view.shown.split}
    shown |= describe_run(view.config, view.protocol)
    if any(report.get(name) != shown[name] for name in shown if name not in _OF_THE_CODE):
        return None
    return read_episodes(view.folder).get(classifier.metric)


def _episode(side: Side, episode: HardEpisode) -> Episode:
    names = [side.images.class_names[side.outputs.labels[row]] for row in episode.support[:, 0]]
    title = f"Episode {episode.number}: {100 * episode.accuracy:.0f} % of the queries right"
    support, queries = side.read(episode.support), side.read(episode.query)
    return Episode(title, names, support, queries, episode.predictions)
