"""The report of one run: JSON for programs, Markdown for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.files import write_atomically, write_json
from experiments.reporting.markdown import bullets, table


def run_report(report: dict[str, Any], lines: Sequence[str]) -> str:
    """The report of a run as Markdown.

    Args:
      report: The results of a run, or what is known of a run that diverged.
      lines: The results in Markdown, as the protocol writes them: first what was evaluated, in a
        phrase. Not used for a run that diverged.
    """
    run = (
        f"{report['label']} on {report['data']}, {report['sampling']} batches, "
        f"seed {report['seed']}: "
    )
    if "diverged" in report:
        text = [f"{run}{report['diverged']}; there is nothing to evaluate"]
    else:
        first, *rest = lines
        text = [
            f"{run}checkpoint of step {report['step']}, {report['split']} split, {first}, "
            f"d = {report['num_features']}",
            *rest,
        ]
    return "\n".join([*text, *origin_lines(report)])


def write_run_report(
    directory: Path, report: dict[str, Any], lines: Sequence[str], name: str = "report"
) -> list[Path]:
    """Write NAME.md and NAME.json into the run directory; returns their paths."""
    return [
        write_atomically(directory / f"{name}.md", run_report(report, lines) + "\n"),
        write_json(directory / f"{name}.json", report),
    ]


def origin_lines(report: dict[str, Any]) -> list[str]:
    """Where the numbers of a report come from, as a list after an empty line; empty if unknown.

    Args:
      report: Of any evaluation; `weights`, `notes`, `version` and `commit` are stated.
    """
    items = [f"The backbone started from {report['weights']}."] if report.get("weights") else []
    items += report.get("notes") or []
    items += [code] if (code := code_version(report)) else []
    return ["", *bullets(items)] if items else []


def metrics_table(metrics: Sequence[dict[str, Any]]) -> list[str]:
    """The metrics of a report as a table with one row.

    Args:
      metrics: Of `Metric.measured`.
    """
    units = {"%": (100, " (%)"), "": (1, "")}
    headings = [metric["name"] + units[metric["unit"]][1] for metric in metrics]
    values = [
        None if metric["value"] is None else f"{units[metric['unit']][0] * metric['value']:.2f}"
        for metric in metrics
    ]
    return table(headings, [values])


def episodes_table(results: Sequence[dict[str, Any]]) -> list[str]:
    """The accuracy over lists of episodes, a row for each number of shots.

    Args:
      results: Of an `EpisodeResult`, with the `split` if there are several.
    """
    splits = any("split" in result for result in results)
    headings = ["shots", "accuracy (%)", "95 % interval", "episodes", "episode list"]
    rows = [
        [
            *([result["split"]] if splits else []),
            result["shots"],
            f"{100 * result['accuracy']:.2f}",
            f"± {100 * result['interval']:.2f}",
            result["episodes"],
            result["hash"],
        ]
        for result in results
    ]
    return table([*(["classes"] if splits else []), *headings], rows)


def code_version(report: dict[str, Any]) -> str:
    """The version of the code that wrote a report, and the commit if it is known; or nothing."""
    if not report.get("version"):
        return ""
    commit = f", commit {report['commit']}" if report.get("commit") else ""
    return f"jaxloss {report['version']}{commit}"
