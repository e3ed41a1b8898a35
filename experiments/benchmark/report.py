"""What was measured, as Markdown for people and JSON for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.benchmark.figure import benchmark_figure
from experiments.benchmark.run import best_torch
from experiments.files import write_atomically, write_json, write_picture
from experiments.reporting.markdown import MISSING, bold, bullets, table

_SAME_SUMS = "The sums of the cosines are the same."
_COLUMNS = {
    "eager": "PyTorch eager",
    "compile": "torch.compile",
    "metric_learning": "pytorch-metric-learning",
    "optax": "optax",
    "scipy": "scipy",
    "torch": "PyTorch",
    "floor": "floor",
}
_SIZES = {
    "toy": "A toy size",
    "paper": "The size of the paper",
    "large": "Ten times larger",
}


def write_benchmark(directory: Path, report: dict[str, Any]) -> list[Path]:
    """Writes benchmark.md, benchmark.json and, with a loss among it, benchmark.png.

    Args:
      directory: Where to; made if it does not exist.
      report: What `run_benchmark` returns.

    Returns:
      The paths written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text = markdown(report)
    if report["losses"]:
        text += "\n![Time and temporary memory of every loss](benchmark.png)\n"
    paths = [
        write_atomically(directory / "benchmark.md", text),
        write_json(directory / "benchmark.json", report),
    ]
    if report["losses"]:
        figure = benchmark_figure(report["losses"], title=_title(report))
        paths.append(write_picture(directory / "benchmark.png", figure))
    return paths


def markdown(report: dict[str, Any]) -> str:
    """All tables of a benchmark."""
    machine, packages = report["machine"], report["versions"]
    lines = [
        f"Command: `{report['command']}`",
        "",
        f"{machine['processor']}, {_cores(machine)}, device {machine['device']}; "
        f"load {machine['load_at_start']} at the start, {machine['load_at_end']} at the end. "
        f"Python {machine['python']}, "
        + ", ".join(f"{name} {version}" for name, version in packages.items())
        + ".",
    ]
    for note in report["notes"]:
        lines += ["", f"Note: {note}"]
    rows = report["losses"]
    if rows:
        lines += ["", *_explanation(rows)]
    for size, heading in _SIZES.items():
        of_size = [row for row in rows if row["size"] == size]
        if of_size:
            lines += ["", f"### {heading}: time", "", *_time_table(of_size)]
            lines += ["", f"### {heading}: temporary memory (MB)", "", *_memory_table(of_size)]
    if report["blocks"]:
        lines += ["", "### NCA in blocks", "", *_block_table(report["blocks"])]
    if report["uniform_prototypes"]:
        lines += ["", "### uniform_prototypes", "", *_spread_table(report["uniform_prototypes"])]
    if report["assign_prototypes"]:
        lines += ["", "### assign_prototypes", "", *_assign_table(report["assign_prototypes"])]
    return "\n".join(lines) + "\n"


def _explanation(rows: list[dict[str, Any]]) -> list[str]:
    floors: dict[str, list[str]] = {}
    sources: dict[str, list[str]] = {}
    for row in {row["loss"]: row for row in rows}.values():
        floors.setdefault(row["products"], []).append(row["loss"])
        sources.setdefault(row["source"], []).append(row["loss"])
    items = [
        "Value and gradients of all float arguments, float32, compiled, after warm-up; all forms "
        "in one process on the same arrays, in turns A B C A B C ... A form whose value or "
        "gradients differ by more than 0.001 is not timed.",
        "jaxloss: median of the calls ± their interquartile range. All other numbers are ratios, "
        "jaxloss's time over that of the column: below 1 jaxloss is faster. Ratios take the "
        "fastest call of each, which the rest of the machine disturbed least.",
        "best: the fastest form in PyTorch. floor: what the loss and its gradient cannot avoid, "
        "as a compiled JAX function of its own, which has "
        + "; ".join(f"for {', '.join(names)} {products}" for products, names in floors.items())
        + ".",
        "size: n × d × C, or n × C for a loss on logits. The papers' sizes: "
        + "; ".join(f"{', '.join(names)}: {source}" for source, names in sources.items())
        + ". Ten times larger is the batch, or the number of classes.",
        "Temporary memory: the most that a run holds beside its arguments, value and gradients.",
    ]
    return bullets(items)


def _time_table(rows: list[dict[str, Any]]) -> list[str]:
    names = _present(rows)
    head = ["loss", "size", "jaxloss (ms)"]
    if any(best_torch(row) for row in rows):
        head.append("best")
    lines = []
    for row in rows:
        forms, best = row["forms"], best_torch(row)
        line = [row["loss"], _shape(row), _milliseconds(forms["jaxloss"])]
        if "best" in head:
            line.append(_ratio(best, strong=True))
        lines.append(line + [_ratio(forms.get(name)) for name in names])
    return table(head + [_COLUMNS[name] for name in names], lines)


def _memory_table(rows: list[dict[str, Any]]) -> list[str]:
    names = ["jaxloss", *(name for name in _present(rows) if name != "floor")]
    lines = []
    for row in rows:
        entries = [_megabytes(row["forms"].get(name)) for name in names]
        lines.append([row["loss"], _shape(row), *entries, f"{row['gradient_bytes'] / 1e6:.3g}"])
    return table(
        ["loss", "size", *(_COLUMNS.get(name, name) for name in names), "gradients"], lines
    )


def _block_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        size = "without" if row["block_size"] is None else f"{row['block_size']:,}"
        lines.append([size, _megabytes(row)])
    first = rows[0]
    return [
        f"Value and gradient of `nca_loss` at n = {first['n']:,}, d = {first['d']}, "
        "as compiled; not run.",
        "",
        *table(["block_size", "temporary memory (MB)"], lines),
    ]


def _spread_table(rows: list[dict[str, Any]]) -> list[str]:
    head = ["M", "d", "steps timed", "jaxloss (ms)", "PyTorch's loop"]
    head += ["steps", "largest cosine", "bound", "published"]
    lines = []
    for row in rows:
        published = MISSING if row["published"] is None else f"{row['published']:.3f}"
        forms = row["forms"]
        torch = {"failure": row["failure"]} if "failure" in row else forms.get("torch")
        lines.append(
            [
                *(str(row["prototypes"]), str(row["dim"]), f"{row['steps_timed']:,}"),
                *(_milliseconds(forms["jaxloss"]), _ratio(torch)),
                f"{row['steps']:,}",
                f"{row['largest_cosine']:.3f}",
                f"{row['bound']:.3f} ({row['bound_kind']})",
                published,
            ]
        )
    return [
        *table(head, lines),
        "",
        "Ratios as above. Bound of the largest cosine: −1/(M−1) of the simplex up to M = d + 1, "
        "0 of the orthoplex up to 2d, beyond it Welch's. Welch bounds the largest |cosine|, so "
        "that the largest cosine can fall below it where some pairs are nearly opposite. "
        "Published: the prototypes that the paper's authors give.",
    ]


def _assign_table(rows: list[dict[str, Any]]) -> list[str]:
    names = [name for name in ("scipy", "optax") if any(name in row["forms"] for row in rows)]
    lines = []
    for row in rows:
        lines.append(
            [
                *(f"{row[key]:,}" for key in ("classes", "prototypes", "dim")),
                row["means"],
                _milliseconds(row["forms"]["jaxloss"]),
                *(_ratio(row["forms"].get(name)) for name in names),
            ]
        )
    return [
        *table(["classes", "prototypes", "d", "means", "jaxloss (ms)", *names], lines),
        "",
        "Each with the product that gives the cosines. Trained: every mean lies near a prototype "
        "of its own; random: in any direction. Ratios as above. "
        + (" ".join(row["failure"] for row in rows if "failure" in row) or _SAME_SUMS),
    ]


def _present(rows: list[dict[str, Any]]) -> list[str]:
    return [name for name in _COLUMNS if any(name in row["forms"] for row in rows)]


def _shape(row: dict[str, Any]) -> str:
    return " × ".join(f"{value:,}" for value in row["shape"].values() if value)


def _milliseconds(form: dict[str, Any]) -> str:
    return f"{_digits(form['median_ms'])} ± {_digits(form['spread_ms'])}"


def _digits(number: float) -> str:
    """Three digits, without an exponent."""
    for places, limit in ((0, 100), (1, 10), (2, 1)):
        if number >= limit:
            return f"{number:,.{places}f}"
    return f"{number:.3f}"


def _ratio(form: dict[str, Any] | None, *, strong: bool = False) -> str:
    if form is None:
        return MISSING
    if "failure" in form:
        return form["failure"]
    text = f"{form['ratio']:.2f}" if form["ratio"] < 10 else f"{form['ratio']:.0f}"
    return bold(text) if strong else text


def _megabytes(form: dict[str, Any] | None) -> str:
    if form is None or form.get("temporary_bytes") is None:
        return MISSING
    return _digits(form["temporary_bytes"] / 1e6)


def _title(report: dict[str, Any]) -> str:
    return f"Loss and gradient: {report['machine']['device']}, {_cores(report['machine'])}"


def _cores(machine: dict[str, Any]) -> str:
    return f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''}"
