"""The results' pages, figures and verdicts are made from the files of `experiments/results`."""

import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
MADE = runpy.run_path(str(ROOT / "docs/results.py"))
PAGES = {Path(of).name: (ROOT / of).read_text(encoding="utf-8") for of in MADE["PAGES"]}


@pytest.fixture
def made(tmp_path):
    """The functions of `docs/results.py`, with a copy of the files that a test may change."""
    functions = runpy.run_path(str(ROOT / "docs/results.py"))
    shutil.copytree(functions["RESULTS"], tmp_path / "results")
    functions["read"].__globals__["RESULTS"] = tmp_path / "results"
    return functions


def change(made, name, old, new):
    path = made["read"].__globals__["RESULTS"] / f"{name}.csv"
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_the_files_have(page):
    assert MADE["render"](PAGES[page]) == PAGES[page], "run `python docs/results.py`"


@pytest.mark.parametrize(
    ("old", "new"),
    [("| +0.13 ± 0.19 |", "| +0.14 ± 0.19 |"), ("[+0.78 ± 0.30](", "[+0.79 ± 0.30](")],
)
def test_a_changed_number_in_a_page_is_another_page(old, new):
    page = PAGES["RESULTS.md"]
    assert page.count(old) == 1
    assert MADE["render"](page.replace(old, new)) == page


def test_a_changed_number_in_a_file_changes_table_text_figure_and_verdict(made):
    change(made, "c-balanced", "+1.26 ± 0.45", "−0.31 ± 0.40")
    page = made["render"](PAGES["RESULTS.md"])
    assert "| static | 78.7 ± 0.6 | 3.7 ± 0.4 | −0.31 ± 0.40 |" in page
    assert "Dynamic is [−0.3 ± 0.4](results/c-balanced.csv" in page
    assert "**Confirmed**: by [−0.3 ± 0.4](results/c-balanced.csv" in page
    rows = made["panels_of"](made["FIGURES"]["sphere-differences"])[1]
    assert rows["static"][0][:2] == (-0.31, 0.4)
    verdict = next(of for of in made["read_verdicts"]() if of["table"] == "c-balanced")
    assert verdict["number"][:2] == (-0.31, 0.4)


def test_intervals_in_sentences_are_those_of_files():
    """In the results, and in the pages of losses and recipes.

    The appendix has some that no table has, and a recipe has those of its own runs.
    """
    text = re.sub(r"^\|(?! \[[A-F]\.).*", "", PAGES["RESULTS.md"], flags=re.MULTILINE)
    texts = [text.partition("How to read")[0] + text.partition("## A.")[2]]
    pages = (
        path for folder in ("losses", "recipes") for path in (ROOT / "docs" / folder).iterdir()
    )
    texts += [
        page.read_text(encoding="utf-8") for page in pages if page.name != "text_retrieval.md"
    ]
    for text in texts:
        assert re.findall(r".*\d\s±\s\d.*", MADE["_QUOTE"].sub("", text)) == []


def test_a_quote_is_a_number_its_negative_or_an_end_of_its_interval(made):
    place = "direct sum, stopped: 5-shot − sum"  # −0.51 ± 0.17
    for title, text in {
        place: "[−0.51 ± 0.17]",
        f"minus {place}": "[0.5 ± 0.2]",
        f"{place} – upper": "[−0.34]",
        f"{place} – lower": "[−0.7]",
    }.items():
        quote = f'{text}(results/a-nca-3200.csv "{title}")'
        wrong = re.sub(r"\d", "9", quote, count=1)
        assert made["render"](wrong) == quote
    for title in (
        *("direct: 5-shot − sum", "direct sum, stopped: 7-shot", "SCE: T, learning rate"),
        "SCE: 1-shot – upper",
    ):
        with pytest.raises(ValueError, match=re.escape(title)):
            made["render"](f'[1](results/a-nca-3200.csv "{title}")')


def test_a_quote_does_not_hide_that_0_is_excluded(made):
    place = "T_P = 1, ε = 1: this − the author's: mAP@sample"  # −1.25 ± 1.16
    quote = f'(results/d-temperature.csv "{place}")'
    assert made["render"](f"[−9.99 ± 9.99]{quote}") == f"[−1.25 ± 1.16]{quote}"
    with pytest.raises(ValueError, match="more decimals"):
        made["render"](f"[−9 ± 9]{quote}")
    # `!`: before it was rounded.
    table = made["read"]("a-nca-3200")
    assert table.rows["NCA"][5] == "−0.23 ± 0.23 !"
    assert "| **−0.23 ± 0.23** |" in table.markdown()[3]
    rows = made["panels_of"](made["FIGURES"]["integration-differences-3200"])[1]
    assert rows["NCA"][1].excludes_0


def test_tables_end_and_verdicts_are_the_same_everywhere():
    for page in PAGES.values():
        assert not re.search(r"^\|.*\n(?![|\n])", page, re.MULTILINE)
    rows = re.findall(r"^\| \[([A-F]\.).*?\*\*(.*?)\*\*", PAGES["RESULTS.md"], re.MULTILINE)
    found = [(letter, verdict.lower().rstrip(".")) for letter, verdict in rows]
    of_chart = dict.fromkeys(of["paper"] for of in MADE["read_verdicts"]())
    assert found == [(name[:2], name.rpartition(": ")[2]) for name in of_chart]


def test_values_of_runs_become_means_and_paired_differences(made):
    rows = {("new", 1): 3.0, ("new", 2): 5.0, ("new", 3): 4.0}
    rows |= {("old", 1): 2.0, ("old", 2): 3.0, ("old", 3): 2.5}
    lines = [
        "# baseline: loss=new",
        "loss,seed,accuracy",
        *(f"{a},{b},{v}" for (a, b), v in rows.items()),
    ]
    path = made["read"].__globals__["RESULTS"] / "runs.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    table = made["read"]("runs")
    assert table.headings == ["loss", "accuracy", "new − this: accuracy"]
    half = 4.302653 * np.std([1, 2, 1.5], ddof=1) / np.sqrt(3)  # The quantile of 2 degrees.
    assert table.rows["old"] == ["old", "2.5 ± 0.5", f"+1.50 ± {half:.2f} !"]
    assert table.rows["new"] == ["new", "4.0 ± 1.0", "–"]
    assert "**+1.50 ± 1.24**" in table.markdown()[-1]
    path.write_text("\n".join(["# baseline: this − loss=new", *lines[1:]]), encoding="utf-8")
    turned = made["read"]("runs")
    assert turned.headings[-1] == "this − new: accuracy"
    assert turned.rows["old"][-1] == f"−1.50 ± {half:.2f} !"
    # A run that diverged is in no pair; without a baseline, there are means alone.
    path.write_text("\n".join([*lines, "new,4,9", "old,4,"]), encoding="utf-8")
    assert made["read"]("runs").rows["old"][1:] == table.rows["old"][1:]
    path.write_text("\n".join(lines[1:]), encoding="utf-8")
    assert made["read"]("runs").rows["new"] == ["new", "4.0 ± 1.0"]
    path.write_text("\n".join([*lines[:3], lines[5]]), encoding="utf-8")
    assert made["read"]("runs").rows["old"] == ["old", "2.0", "+1.00"]


def test_every_file_is_used_and_says_how_it_was_made():
    text = "".join(PAGES.values())
    names = {path.stem for path in MADE["RESULTS"].glob("*.csv")} - {"verdicts"}
    assert set(re.findall(r"<!-- results/([\w-]+)\.csv", text)) == names
    for name in names:
        facts = MADE["read"](name).facts
        of_runs = {"command", "commands"} & set(facts) and {"commit", "code"} & set(facts)
        assert "source" in facts or of_runs, name
    pictures = set(re.findall(r"figures/(.*)\.png", text))
    assert pictures == {*MADE["FIGURES"], "verdicts"}
    for name, picture in MADE["FIGURES"].items():
        headings, rows = MADE["panels_of"](picture)
        assert len(headings) > 1, name
        assert len(rows) > 1, name


def test_results_stay_short():
    page = PAGES["RESULTS.md"]
    sections = re.split(r"^#{2,3} ", page, flags=re.MULTILINE)
    assert page.count("\n") <= 300
    assert max(section.count("\n") for section in sections[1:]) <= 60
