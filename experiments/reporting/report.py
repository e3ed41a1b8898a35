"""The report of one run: JSON for programs, Markdown for people."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def run_report(report: dict[str, Any]) -> str:
    """The report that `evaluate_run` returns, as Markdown."""
    evaluation = report["evaluation"]
    lines = [
        f"{report['label']} on {report['data']}, {report['sampling']} batches, "
        f"seed {report['seed']}: checkpoint of step {report['step']}, {report['split']} classes, "
        f"{evaluation['ways']}-way, {evaluation['queries']} queries a class, "
        f"nearest prototype ({evaluation['distance']}), d = {report['num_features']}",
        "",
        "| shots | accuracy (%) | 95 % interval | episodes | episode list |",
        "|---|---|---|---|---|",
    ]
    for result in report["results"]:
        lines.append(
            f"| {result['shots']} | {100 * result['accuracy']:.2f} "
            f"| ± {100 * result['interval']:.2f} | {result['episodes']} | {result['hash']} |"
        )
    return "\n".join(lines)


def write_run_report(directory: Path, report: dict[str, Any], name: str = "report") -> list[Path]:
    """Writes NAME.json and NAME.md into the run directory and returns their paths."""
    as_json = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    return [
        _write(directory / f"{name}.md", run_report(report) + "\n"),
        _write(directory / f"{name}.json", as_json),
    ]


def _write(path: Path, text: str) -> Path:
    # A reader sees the old file or the new one, never half of it.
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return path
