"""The report of a linear evaluation, from numbers to files."""

import json

import pytest

from experiments.transfer import linear_report, write_linear_report

REPORT = {
    "run": {"label": "SCE", "data": "icons", "sampling": "random", "seed": 0},
    "data": "drawings",
    "split": "all",
    "step": 7,
    "num_features": 64,
    "image_size": [32, 32],
    "stored_size": [32, 32],
    "classes": 3,
    "seen_in_training": "",
    "version": "0.9.0",
    "commit": None,
    "result": {
        "accuracy": 0.76123,
        "class_mean_accuracy": 0.7,
        "validation_accuracy": 0.75,
        "best_test_accuracy": 0.8,
        "best_test_penalty": 100.0,
        "penalty": 1.0,
        "penalties": [0.01, 1.0, 100.0],
        "validation": [0.5, 0.75, 0.1],
        "test": [0.6, 0.8, 0.2],
        "train_samples": 30,
        "validation_samples": 10,
        "test_samples": 20,
        "unconverged": 0,
        "converged": True,
    },
}


def test_numbers_have_two_digits():
    lines = [" ".join(line.split()) for line in linear_report(REPORT).splitlines()]
    assert lines[0].endswith(
        "of the features of SCE trained on icons, random batches, seed 0, step 7, d = 64."
    )
    assert "| validation | 1 | 23.88 | 76.12 | 70.00 | 75.00 |" in lines
    assert "| test, as in the paper | 100 | 20.00 | 80.00 | – | – |" in lines
    assert any("chosen on the test images" in line for line in lines)
    assert not any(word in " ".join(lines) for word in ("resized", "transfer", "tolerance"))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"stored_size": [40, 44]}, "Images were resized from 40×44 to 32×32 pixels."),
        ({"seen_in_training": "icons"}, "The backbone was trained on icons: this is no transfer."),
        (
            {"result": REPORT["result"] | {"unconverged": 2, "converged": False}},
            "3 solves ended before they met the tolerance.",
        ),
        ({"notes": ["Another checkpoint was taken."]}, "- Another checkpoint was taken."),
    ],
)
def test_what_limits_the_result_is_stated(changed, sentence):
    assert sentence in linear_report(REPORT | changed).splitlines()


def test_files(tmp_path):
    paths = write_linear_report(tmp_path, REPORT, "linear-drawings", command="typed")
    assert [path.suffix for path in paths] == [".md", ".json", ".png"]
    assert paths[0].read_text().endswith("![accuracy against λ](linear-drawings.png)\n\n`typed`\n")
    assert json.loads(paths[1].read_text()) == REPORT | {"command": "typed"}
    assert paths[2].read_bytes()[:4] == b"\x89PNG"
