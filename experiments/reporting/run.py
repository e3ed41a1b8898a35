"""The report of one run: JSON for programs, Markdown for people."""

from __future__ import annotations

import io
import logging
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

import jaxloss
from experiments.core.config import TrainConfig
from experiments.core.protocol import Protocol
from experiments.core.storage import check_json, load_json, regular, write_atomically, write_json
from experiments.reporting.markdown import bullets, format_value, table, with_unit

logger = logging.getLogger(__name__)

# As kinds of `check_json`.
METRIC = {
    "name": str,
    "unit": Literal["%", ""],
    "higher_is_better": bool | None,
    "value": float | None,
    "interval": float | None,
}
_REPORT = {
    **dict.fromkeys(("label", "data", "sampling", "version", "split"), str),
    **{"commit": str | None, "seed": int, "step": int, "metrics": [METRIC]},
    **{"validation": Any, "command": str, "notes?": [str], "seconds?": float, "diverged?": str},
}

EPISODES = "episodes.npz"
"""The accuracy in every episode, for each metric that is a mean over episodes: float32 [E]."""


def describe_run(config: TrainConfig, protocol: Protocol) -> dict[str, Any]:
    """What a report states of a run beside its results, as JSON types."""
    return {
        "protocol": config.protocol,
        "preset": config.preset,
        "loss": config.loss.name,
        "sampling": config.sampling.strategy,
        "seed": config.seed,
        "data": config.data.name,
        **code_version(),
        **protocol.description,
    }


@cache
def code_version() -> dict[str, str | None]:
    """The version of the code, and its git commit if it runs from a checkout."""
    git = ("git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=12")
    try:
        output = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        output = ""
    return {"version": jaxloss.__version__, "commit": output or None}


def report_text(protocol: Protocol, report: dict[str, Any]) -> str:
    """The report of a run as Markdown. A run that diverged has no results."""
    facts = [
        f"Loss: {report['label']}",
        f"Data: {report['data']}",
        f"Training batches: {report['sampling']}, seed {report['seed']}",
    ]
    results = []
    if "diverged" in report:
        facts.append(f"Result: {report['diverged']}; there is nothing to evaluate")
    else:
        evaluated, *results = protocol.report(report)
        facts += [
            f"Checkpoint: step {report['step']}",
            f"Features: {report['num_features']} dimensions",
            f"Evaluation: {report['split']} split, {evaluated}",
        ]
        if last := report.get("last"):
            same = last["step"] == report["step"]
            of_last = f"Of the last checkpoint, that of step {last['step']}:"
            results += ["", "The best checkpoint is the last one." if same else of_last]
            results += [] if same else protocol.report(last)[1:]
    if found := report["validation"]:
        value = format_value(found["value"], found["unit"])
        facts.append(f"Validation: {found['name']} {value} {found['unit']}".rstrip())
    facts += [*report.get("notes", ()), f"Code: {version_text(report)}"]
    return "\n".join([*bullets(facts), *results])


def write_report(
    directory: Path, protocol: Protocol, report: dict[str, Any], name: str = "report"
) -> list[Path]:
    """Writes NAME.md and NAME.json into the run directory; returns their paths.

    Where the report has accuracies of single episodes under `episodes`, a list for each metric,
    they are written to NAME-episodes.npz instead, and those of `report` to episodes.npz.
    """
    report, paths = dict(report), []
    if episodes := report.pop("episodes", None):
        archive, file = io.BytesIO(), EPISODES if name == "report" else f"{name}-{EPISODES}"
        arrays: Any = {of: np.asarray(values, np.float32) for of, values in episodes.items()}
        np.savez(archive, **arrays)
        paths = [write_atomically(directory / file, archive.getvalue())]
    # The JSON comes last: it marks a run as finished.
    markdown = write_atomically(directory / f"{name}.md", report_text(protocol, report) + "\n")
    return [markdown, write_json(directory / f"{name}.json", report), *paths]


def metrics_table(metrics: Sequence[dict[str, Any]]) -> list[str]:
    """The metrics of a report, as `Metric.measured` gives them, in a table with one row."""
    return table(
        [with_unit(metric["name"], metric["unit"]) for metric in metrics],
        [[format_value(metric["value"], metric["unit"], digits=2) for metric in metrics]],
    )


def episodes_table(results: Sequence[dict[str, Any]]) -> list[str]:
    """The accuracy over lists of episodes, an `EpisodeResult` a row, and a note."""
    columns = {
        "classes": [result.get("split") for result in results],
        "classifier": [result["classifier"] for result in results],
        "shots": [result["shots"] for result in results],
        "accuracy (%)": [format_value(result["accuracy"], "%", digits=2) for result in results],
        "95 % interval": [f"± {format_value(r['interval'], '%', digits=2)}" for r in results],
        "episodes": [result["episodes"] for result in results],
        "episode list": [result["hash"] for result in results],
    }
    if not any(columns["classes"]):
        del columns["classes"]
    if len(set(columns["classifier"])) < 2:
        del columns["classifier"]
    note = "95 % interval: over the episodes of this run; it does not cover other seeds."
    return [*table([*columns], zip(*columns.values(), strict=True)), "", note]


def version_text(report: dict[str, Any]) -> str:
    """The version of the code that wrote a report, and the commit if it is known."""
    commit = f", commit {report['commit']}" if report["commit"] else ""
    return f"jaxloss {report['version']}{commit}"


def read_report(
    path: Path,
    text: Callable[[dict[str, Any]], object] = lambda report: None,
    kind: Mapping[str, Any] = _REPORT,
) -> dict[str, Any] | None:
    """The report of a finished run; None if there is none or, with a warning, if it is damaged.

    It has what tables and figures of several runs need, by the `kind` of `check_json`, and what its
    own protocol needs: `text`, which makes a text of it, has no error.
    """
    if not path.exists():
        return None
    try:
        report = load_json(path)
        check_json(report, kind, "the report")
        if report.get("validation") is not None:
            check_json(report["validation"], METRIC, "the report.validation")
        text(report)
    except Exception as error:  # Of `text`, whatever an entry of another type leads to.
        logger.warning("%s cannot be read (%s: %.200s)", path, type(error).__name__, error)
        return None
    return report


def read_episodes(directory: Path) -> dict[str, np.ndarray]:
    """The accuracies of single episodes of a finished run, by metric.

    Empty if the run has none, or, with a warning, if the file is damaged.
    """
    path = directory / EPISODES
    if not path.exists():
        return {}
    try:
        with np.load(io.BytesIO(regular(path).read_bytes()), allow_pickle=False) as stored:
            return dict(stored)
    except Exception as error:  # NumPy and zipfile have a dozen.
        logger.warning("%s cannot be read (%s: %.200s)", path, type(error).__name__, error)
        return {}
