r"""Protocol E: few-shot transfer with a negative margin.

    python -m experiments train PRESET

Source: Liu et al., ECCV 2020, and the configuration that its authors published. All values on
photographs are theirs, but for the distance of validations by nearest prototypes, which is ours.
Weight decay and margin are the pairs that they chose for 1-shot and for 5-shot episodes. Epochs
include those of the warm-up.

The authors' other backbones, at 84 and 80 pixels, with `--loss.name cosine` for cosines:

    python -m experiments train mini-imagenet-margin-softmax --data.name mini_imagenet@96 \
        --data.image-size 84 --data.resize 96 --model.backbone conv4 \
        --model.widths 64 64 64 64 --model.pooling flatten
    python -m experiments train mini-imagenet-margin-softmax --data.name mini_imagenet@92 \
        --data.image-size 80 --data.resize 92 --model.backbone wrn28 --model.widths 160 320 640

Images are stored whole, their shorter side at the one to which evaluation resizes both sides
(`@257`, `@96`, `@92`). Archives of squares of 84 pixels have no more to crop.

By default, the base classes are evaluated on training images. For the base columns of Table 6, the
authors take the training images of ILSVRC 2012 that are not in mini-ImageNet: `--data.base-test
imagenet@257` (`imagenet@96` for ResNet-12) takes its validation images, 50 of each class. Without
the archives of ImageNet, and for CUB, `--data.holdout 0.05` holds out 30 images of each class.

Further experiments of the paper:

    python -m experiments sweep mini-imagenet-margin \
        --over loss.margin=-0.5,-0.3,-0.1,-0.05,-0.02,0,0.1,0.3 --metrics "base 1-shot" \
        "base 5-shot" "base discriminability" "novel 1-shot" "novel 5-shot" "novel discriminability"
    python -m experiments train mini-imagenet-margin --loss.margin 0 --loss.label-smoothing 0.05 \
        --data.base-test imagenet@257
    python -m experiments evaluate RUN --split validation \
        --over fine_tuning.margin=-0.5,-0.3,-0.1,0,0.1,0.3,0.5

These are the sweep of margins, Table 6 (label smoothing), and Fig. 9 with the run of margin -0.3.
"""

from dataclasses import replace
from typing import Any, Literal

from experiments.core.config import ModelConfig, OptimizerConfig, SamplingConfig
from experiments.papers.negative_margin import (
    MarginData,
    MarginEvaluation,
    MarginLoss,
    NegativeMarginConfig,
)
from experiments.papers.presets.shared import FASHION, RESNET12, Preset

_ADAM = OptimizerConfig(kind="adam", learning_rate=3e-3, warmup_from=1 / 16)
_CONV4 = ModelConfig(widths=(16, 32, 64, 64))

PRESETS = {
    # 35 % of every base class are held out for the episodes of base classes.
    "icons-margin": Preset(
        "Negative margin on the shipped icons (100 / 29 / 50 classes, 32×32 grey, Conv4).",
        NegativeMarginConfig(
            data=MarginData(holdout=0.35),
            model=_CONV4,
            optimizer=replace(_ADAM, weight_decay=1e-5, warmup_steps=200),
            steps=800,
            validate_every=200,
        ),
    ),
    # Novel classes that are less compact than base ones: the share of eq. (10) is about 0.5, on the
    # icons about 1. Needs the extra `kanji`. A mirrored character is another one, hence no flips.
    "kanji-margin": Preset(
        "Negative margin on kanji grouped by radical (33 / 14 / 20 classes, 32×32 grey, Conv4).",
        NegativeMarginConfig(
            data=MarginData(
                name="kanji_radicals@32",
                holdout=0.35,
                mean=(0.22,),
                std=(0.38,),
                pad=0,
                flip=False,
                image_size=32,
                crop_scale=(0.3, 1.0),
            ),
            model=ModelConfig(widths=(16, 32, 64, 128)),
            optimizer=replace(_ADAM, weight_decay=5e-4, warmup_steps=400),
            steps=1600,
            validate_every=200,
        ),
    ),
    # No class is left for validation, so the last checkpoint is evaluated. --data.subset-seed draws
    # other splits (3 draws that of 0); --data.base-classes 0 --data.novel icons trains on all ten.
    "fashion-margin": Preset(
        "Negative margin on Fashion-MNIST (5 / – / 5 classes by seed, 32×32 grey, Conv4).",
        NegativeMarginConfig(
            data=MarginData(**FASHION, base_classes=5),
            model=_CONV4,
            optimizer=replace(_ADAM, weight_decay=1e-5, warmup_steps=400),
            steps=1600,
            validate_every=400,
        ),
    ),
}

# For each set: base and novel classes, images of the base ones, epochs, and those of the warm-up.
_DATA = {
    # The images of base classes in episodes were trained on; those of the paper are other training
    # images of ImageNet (see --data.base-test above).
    "mini": ("mini-ImageNet (64 / 16 / 20", "mini_imagenet", "", 64 * 600, 400, 100),
    # The classifier has an output for each of the 100 base classes; the authors' has 200, half of
    # which belong to no base class.
    "cub": ("CUB few-shot (100 / 50 / 50", "cub_fewshot", "", 5885, 200, 50),
    # The authors give the settings of 5-shot episodes alone.
    "cross": (
        "mini-ImageNet to CUB (100 / 50 / 50",
        "mini_imagenet",
        "cub_fewshot",
        60000,
        400,
        100,
    ),
}
# For each ResNet: the side of its images, and that before the crop, ⌊1.15 · side⌋.
_NETWORKS = {
    18: (ModelConfig(backbone="resnet18", widths=(64, 128, 256, 512), pooling="mean"), 224, 257),
    12: (replace(RESNET12, drop_block=0.0), 84, 96),
}
# By preset: data, network, loss, shots, weight decay, margin, and rate and size of DropBlock.
_TABLE: list[tuple[Any, ...]] = [
    ("mini-imagenet-margin", "mini", 18, "cosine", 1, 5e-5, -0.05, (0.2, 3)),
    ("mini-imagenet-margin-5shot", "mini", 18, "cosine", 5, 1e-4, -0.02, (0.2, 3)),
    ("mini-imagenet-margin-softmax", "mini", 18, "softmax", 1, 1e-4, -0.3, None),
    ("mini-imagenet-margin-softmax-5shot", "mini", 18, "softmax", 5, 5e-5, -0.3, None),
    ("mini-imagenet-margin-resnet12", "mini", 12, "cosine", 1, 1e-4, -0.02, (0.1, 5)),
    ("mini-imagenet-margin-resnet12-5shot", "mini", 12, "cosine", 5, 1e-4, -0.01, (0.1, 5)),
    ("mini-imagenet-margin-resnet12-softmax", "mini", 12, "softmax", 1, 3e-4, -0.01, (0.1, 5)),
    ("mini-imagenet-margin-resnet12-softmax-5shot", "mini", 12, "softmax", 5, 1e-5, -0.1, (0.1, 5)),
    ("cub-margin", "cub", 18, "cosine", 1, 5e-4, -0.01, (0.1, 5)),
    ("cub-margin-5shot", "cub", 18, "cosine", 5, 1e-3, -0.01, (0.1, 5)),
    ("cub-margin-softmax", "cub", 18, "softmax", 1, 5e-3, -0.05, None),
    ("cub-margin-softmax-5shot", "cub", 18, "softmax", 5, 3e-3, -0.005, None),
    ("mini-imagenet-cub", "cross", 18, "cosine", 5, 5e-5, -0.05, None),
    ("mini-imagenet-cub-softmax", "cross", 18, "softmax", 5, 1e-6, -0.005, None),
]


def _photographs(
    data: str,
    layers: int,
    loss: Literal["cosine", "softmax"],
    shots: int,
    weight_decay: float,
    margin: float,
    drop_block: tuple[float, int] | None,
) -> Preset:
    """The preset of a row of the table: Adam on random resized crops.

    What differs, beside `shared.py`: the last batch of an epoch is full; the authors' is
    smaller, so that the number of steps is the same. The cosine ends at 0; the authors' ends at
    1e-6, and lags one step behind. Validations have the same episodes each time; the authors' have
    new ones. The deviation in an interval divides by E − 1 episodes; the authors' by E. DropBlock
    scales by the units kept of each image; the authors' by those of the whole batch.
    """
    title, base, novel, images, epochs, warmup = _DATA[data]
    model, side, resized = _NETWORKS[layers]
    batch_size = 256
    epoch = -(-images // batch_size)
    if drop_block:
        rate, size = drop_block
        drops: dict[str, Any] = {"dropout": rate, "drop_block": rate, "drop_block_size": size}
        model = replace(model, **drops, drop_block_steps=40000)
    config = NegativeMarginConfig(
        data=MarginData(
            name=f"{base}@{resized}",
            novel=novel and f"{novel}@{resized}",
            mean=(0.507, 0.487, 0.441),
            std=(0.267, 0.257, 0.276),
            pad=0,
            color_jitter=0.4,
            image_size=side,
            resize=resized,
            resize_to_square=True,
            crop_scale=(0.08, 1.0),
        ),
        sampling=SamplingConfig(batch_size=batch_size),
        model=model,
        loss=MarginLoss(name=loss, margin=margin),
        optimizer=replace(
            _ADAM, weight_decay=weight_decay, decay_all=True, warmup_steps=warmup * epoch
        ),
        evaluation=MarginEvaluation(
            selection="fine-tuned", validation_shots=5, validation_episodes=100
        ),
        steps=epochs * epoch,
        validate_every=20 * epoch,
        report_last=True,
    )
    trained = f"ResNet-{layers}, {loss}, settings for {shots}-shot)"
    return Preset(f"Negative margin on {title} classes, {trained}.", config)


PRESETS |= {name: _photographs(*row) for name, *row in _TABLE}
