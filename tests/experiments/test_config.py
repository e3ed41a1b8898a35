"""Options that were added after runs had been made."""

import dataclasses
import json

import pytest

from experiments.config import (
    DataConfig,
    FewShotConfig,
    ModelConfig,
    check_config,
    from_dict,
    to_dict,
)
from experiments.errors import ConfigError
from experiments.presets import PRESETS
from experiments.training.checkpoints import ConfigMismatchError, claim_run_directory

# What runs of the first version hold of these two sections.
FIRST_DATA = {
    "name": "icons",
    "mean": [0.5],
    "std": [0.5],
    "pad": 4,
    "flip": True,
    "color_jitter": 0.0,
}
FIRST_MODEL = {
    "backbone": "conv4",
    "widths": [64, 64, 64, 64],
    "pooling": "flatten",
    "drop_block": 0.0,
    "dtype": "float32",
}
NEW = dataclasses.replace(
    FewShotConfig(),
    data=DataConfig(image_size=80, resize=92, crop_scale=(0.08, 1.0), lighting=0.1, pad=0),
    model=ModelConfig("wrn28", (160, 320, 640), blocks=(2, 2, 2), dropout=0.5),
)


def test_defaults_are_written_as_the_first_version_wrote_them():
    assert to_dict(DataConfig()) == FIRST_DATA
    assert to_dict(ModelConfig()) == FIRST_MODEL
    for config in (preset.config for preset in PRESETS.values()):
        if not isinstance(config, FewShotConfig):
            continue
        written = to_dict(config)
        assert written["data"].keys() == FIRST_DATA.keys()
        assert written["model"].keys() == FIRST_MODEL.keys()


def test_what_is_younger_is_read_as_its_default():
    assert from_dict(DataConfig, FIRST_DATA) == DataConfig()
    assert from_dict(ModelConfig, FIRST_MODEL) == ModelConfig()
    explicit = FIRST_MODEL | {"dropout": 0.0, "blocks": [], "stem": "imagenet"}
    assert from_dict(ModelConfig, explicit) == ModelConfig()
    with pytest.raises(ConfigError, match="missing keys \\['widths'\\]"):
        from_dict(ModelConfig, {k: v for k, v in FIRST_MODEL.items() if k != "widths"})


def test_new_options_survive_a_file():
    check_config(NEW)
    written = json.loads(json.dumps(to_dict(NEW)))
    assert written["data"]["crop_scale"] == [0.08, 1.0]
    assert "crop_ratio" not in written["data"]
    assert "stem" not in written["model"]
    assert from_dict(FewShotConfig, written) == NEW


def test_a_run_from_before_goes_on(tmp_path):
    first = to_dict(FewShotConfig()) | {"data": FIRST_DATA, "model": FIRST_MODEL}
    assert not claim_run_directory(tmp_path, first)
    assert claim_run_directory(tmp_path, to_dict(FewShotConfig()))
    lit = dataclasses.replace(FewShotConfig(), data=DataConfig(lighting=0.1))
    with pytest.raises(ConfigMismatchError, match=r"data\.lighting: \(absent\) -> 0\.1"):
        claim_run_directory(tmp_path, to_dict(lit))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(crop_scale=(0.0, 1.0)), "data.crop_scale must be above 0"),
        (DataConfig(crop_ratio=()), "data.crop_ratio needs at least one"),
        (DataConfig(lighting=-0.1), "data.lighting must be at least 0"),
        (DataConfig(image_size=-1), "data.image_size must be at least 0"),
        (DataConfig(imbalance=2.0), "data.imbalance must be above 0 and at most 1, got 2"),
    ],
)
def test_numbers_are_checked(config, message):
    with pytest.raises(ConfigError, match=message):
        check_config(config, "data.")
