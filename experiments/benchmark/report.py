"""What was measured, as Markdown for people and JSON for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.benchmark.figure import STYLES, benchmark_figure
from experiments.benchmark.run import QUIET, best_torch
from experiments.reporting.markdown import MISSING, bold, table
from experiments.storage import write_atomically, write_json, write_picture

_SIZES = {
    "paper": "The size of the paper",
    "large": "Ten times larger",
    "own": "Sizes of single losses",
}

_HOW_TO_READ = """
How it is measured:

- Each form computes the value and the gradients of all float arguments, in float32, compiled, after
  a warm-up.
- All forms run in one process on the same arrays, in turns. A form whose value or gradients differ
  by more than 0.001 is not timed.

How to read the tables:

- **jaxloss**: median time of the calls ± their interquartile range.
- **All other columns** are ratios: jaxloss's time divided by that of the column. Below 1, jaxloss
  is faster. Ratios use the fastest call of each form, which other programs disturb least.
- **best**: the fastest form in PyTorch.
- **floor**: a compiled JAX function that does little more than what the loss and its gradient
  cannot avoid. A product n·n·d takes 2n²d operations. For a loss of all pairs of a batch, the
  similarities are symmetric, so that 3n²d operations would do where they are kept for the
  gradient; where they are computed twice, 4n²d. The floor takes two bare products, 4n²d.
- **composition**: the same loss from simpler functions of jaxloss.
- **size**: n × d × C, or n × C for a loss on logits.
- **Temporary memory**: the most that a run holds beside its arguments, its value and its gradients.
"""
_BOUNDS = """
Ratios as above. *Published* is the largest cosine of the prototypes that the paper's authors
provide. *Bound* is a lower bound of the largest cosine:

| number of prototypes M | bound |
|---|---|
| up to d + 1 | −1/(M−1), the simplex |
| up to 2d | 0, the orthoplex |
| more | Welch's bound |

Welch's bound holds for the largest absolute cosine. The largest cosine itself can fall below it
where some pairs are nearly opposite.
"""
_ASSIGNMENTS = """
Ratios as above. The times include the matrix product that gives the cosines. *Trained*: every class
mean lies near a prototype of its own. *Random*: it points in any direction.
"""


_STEPS = """
A step of `experiments.training` with SCE⊕NCA: backbone, loss, gradients, SGD with momentum. PyTorch
makes the same step in `channels_last`, from the same parameters; its first losses agree. Random
crops and flips are left out of both. The ratio is as above. *loss*: the loss and its gradient
alone, as a share of the step. The C library keeps freed memory, as in all commands of the
experiments. Both need this.
"""


def write_benchmark(directory: Path, report: dict[str, Any]) -> list[Path]:
    """Writes benchmark.md and benchmark.json, and benchmark.png of the losses at common sizes.

    Args:
      directory: Created if it does not exist.
      report: Of `run_benchmark`.

    Returns:
      The paths written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text = markdown(report)
    paths = [write_json(directory / "benchmark.json", report)]
    if drawn := [row for row in report["losses"] if row["size"] != "own"]:
        text += "\n![Time and temporary memory of every loss](benchmark.png)\n"
        machine = report["machine"]
        title = f"Loss and gradient: {machine['device']}, {_cores(machine)}"
        figure = benchmark_figure(drawn, title=title)
        paths.append(write_picture(directory / "benchmark.png", figure))
    return [write_atomically(directory / "benchmark.md", text), *paths]


def markdown(report: dict[str, Any]) -> str:
    """All tables of a benchmark."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = []
    if (others := machine["cores_of_others"]) is not None and others > QUIET:
        lines = [
            f"**Other programs used {others:.1f} of {_cores(machine)} at the start: the times are "
            "those of a busy machine.**",
            "",
        ]
    lines += [
        f"Command: `{report['command']}`",
        "",
        f"{machine['processor']}, {_cores(machine)}, device {machine['device']}; "
        f"load {machine['load_at_start']} at the start, {machine['load_at_end']} at the end. "
        f"Python {machine['python']}, {versions}.",
    ]
    for note in report["notes"]:
        lines += ["", f"Note: {note}"]
    rows = report["losses"]
    if rows:
        lines += [_HOW_TO_READ, *_explanation(rows)]
    for size, heading in _SIZES.items():
        if of_size := [row for row in rows if row["size"] == size]:
            lines += ["", f"### {heading}: time", "", *_time_table(of_size)]
            lines += ["", f"### {heading}: temporary memory (MB)", "", *_memory_table(of_size)]
    for key, heading, describe in (
        ("uniform_prototypes", "uniform_prototypes", _spread_table),
        ("assign_prototypes", "assign_prototypes", _assign_table),
        ("steps", "Training steps", _step_table),
    ):
        if report[key]:
            lines += ["", f"### {heading}", "", *describe(report[key])]
    return "\n".join(lines).rstrip() + "\n"


def _explanation(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "What the floor of each loss computes:",
        "",
        *table(["loss", "floor"], _losses_by(rows, "products")),
        "",
        "Which size is the paper's:",
        "",
        *table(["loss", "data set, network, batch"], _losses_by(rows, "source")),
        "",
        "The larger size has ten times the batch, or ten times the classes.",
    ]


def _losses_by(rows: list[dict[str, Any]], key: str) -> list[list[str]]:
    """The losses with the same text, for each text."""
    groups: dict[str, dict[str, None]] = {}
    for row in rows:
        groups.setdefault(row[key], {})[row["loss"]] = None
    return [[", ".join(losses), text] for text, losses in groups.items()]


def _time_table(rows: list[dict[str, Any]]) -> list[str]:
    names = _present(rows)
    best = [best_torch(row) for row in rows]
    headings = ["loss", "size", "jaxloss (ms)", *(["best"] if any(best) else [])]
    cells = [
        [
            row["loss"],
            _shape(row),
            _milliseconds(row["forms"]["jaxloss"]),
            *([bold(_ratio(fastest)) if fastest else MISSING] if any(best) else []),
            *(_ratio(row["forms"].get(name)) for name in names),
        ]
        for row, fastest in zip(rows, best, strict=True)
    ]
    return table(headings + [STYLES[name].label for name in names], cells)


def _memory_table(rows: list[dict[str, Any]]) -> list[str]:
    names = ["jaxloss", *(name for name in _present(rows) if name != "floor")]
    cells = [
        [
            row["loss"],
            _shape(row),
            *(_megabytes(row["forms"].get(name)) for name in names),
            _digits(row["gradient_bytes"] / 1e6),
        ]
        for row in rows
    ]
    return table(["loss", "size", *(STYLES[name].label for name in names), "gradients"], cells)


def _spread_table(rows: list[dict[str, Any]]) -> list[str]:
    return [*_solver_table(rows), _BOUNDS.rstrip()]


def _assign_table(rows: list[dict[str, Any]]) -> list[str]:
    if all(row["agree"] for row in rows):
        verdict = "Both solvers find assignments with the same sum of cosines."
    else:
        verdict = "**The solvers find assignments with different sums of cosines.**"
    return [*_solver_table(rows), _ASSIGNMENTS + verdict]


def _step_table(rows: list[dict[str, Any]]) -> list[str]:
    return [*_solver_table(rows), _STEPS.rstrip()]


def _solver_table(rows: list[dict[str, Any]]) -> list[str]:
    problem, forms, result = (list(rows[0][key]) for key in ("problem", "forms", "result"))
    cells = [
        [
            *(_number(value) for value in row["problem"].values()),
            _milliseconds(row["forms"]["jaxloss"]),
            *(_ratio(row["forms"].get(name)) for name in forms[1:]),
            *(_number(value) for value in row["result"].values()),
        ]
        for row in rows
    ]
    return table([*problem, "jaxloss (ms)", *forms[1:], *result], cells)


def _number(value: Any) -> Any:
    """A count or a cosine as tables print it; anything else as it is."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else value


def _present(rows: list[dict[str, Any]]) -> list[str]:
    """The forms that are compared with jaxloss, in the order of the columns."""
    return [name for name in STYLES if name != "jaxloss" and any(name in r["forms"] for r in rows)]


def _shape(row: dict[str, Any]) -> str:
    return " × ".join(f"{value:,}" for value in row["shape"].values() if value)


def _milliseconds(form: dict[str, Any]) -> str:
    return f"{_digits(form['median_ms'])} ± {_digits(form['spread_ms'])}"


def _digits(number: float) -> str:
    """Three digits, without an exponent."""
    places = 0 if number >= 100 else 1 if number >= 10 else 2 if number >= 1 else 3
    return f"{number:,.{places}f}"


def _ratio(form: dict[str, Any] | None) -> str:
    if form is None:
        return MISSING
    return form.get("failure") or f"{form['ratio']:.{2 if form['ratio'] < 10 else 0}f}"


def _megabytes(form: dict[str, Any] | None) -> str | None:
    """None is printed as `MISSING`."""
    if form is None or form.get("temporary_bytes") is None:
        return None
    return _digits(form["temporary_bytes"] / 1e6)


def _cores(machine: dict[str, Any]) -> str:
    return f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''}"
