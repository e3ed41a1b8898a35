"""The report of one run: JSON for programs, Markdown for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.files import write_atomically
from experiments.protocols import protocol_named


def run_report(report: dict[str, Any]) -> str:
    """The report that `evaluate_run` returns, or that of a run that diverged, as Markdown."""
    run = (
        f"{report['label']} on {report['data']}, {report['sampling']} batches, "
        f"seed {report['seed']}: "
    )
    if "diverged" in report:
        return f"{run}{report['diverged']}; there is nothing to evaluate"
    first, *lines = protocol_named(report.get("protocol")).report(report)
    if report.get("weights"):
        lines += ["", f"The backbone started from {report['weights']}."]
    return "\n".join(
        [
            f"{run}checkpoint of step {report['step']}, {report['split']} split, {first}, "
            f"d = {report['num_features']}",
            *lines,
        ]
    )


def evaluation_name(report: dict[str, Any]) -> str:
    """A file name that tells the settings: two evaluations of a run do not overwrite each other."""
    settings = report.get("evaluation")
    if settings is None:
        return f"evaluation-{report['split']}-step{report['step']}"
    shots = "+".join(map(str, settings["shots"]))
    return (
        f"evaluation-{report['split']}-step{report['step']}-{settings['ways']}way-{shots}shot-"
        f"{settings['queries']}queries-{settings['episodes']}episodes-seed{settings['seed']}-"
        f"{settings['distance']}"
    )


def write_run_report(directory: Path, report: dict[str, Any], name: str = "report") -> list[Path]:
    """Writes NAME.json and NAME.md into the run directory and returns their paths."""
    as_json = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    return [
        write_atomically(directory / f"{name}.md", run_report(report) + "\n"),
        write_atomically(directory / f"{name}.json", as_json),
    ]
