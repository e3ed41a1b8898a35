"""The published settings of the protocols, by preset; a copy that changes only with its source.

A: Kobayashi, BMVC 2024: supplement, Tables A to D. Backbone, ways and queries are from the paper's
main text, which is not at hand. Optimiser and epochs are not known. Eq. (vi) and (viii) stop no
gradient.
B: Kobayashi, WACV 2021: supplement, section B.1 and Table B.1. The backbone is from the paper's
main text, which is not at hand.
C: Saadabadi et al., CVPR 2024: supplement, sections 7.1 and 7.2, and the authors' published code.
D: Kobayashi, CVPR 2023: supplement, Tables B and C and section B; the authors' published
configuration for MS-COCO. Table 8 trains on ImageNet; the training is not published.
E: the configuration that the authors published. Its last batch of an epoch is smaller: 5,885 images
give 23 batches of 256, and 60,000 give 235.
"""

from typing import Any

Settings = dict[str, Any]


def of(section: str, **options: Any) -> Settings:
    """Options of a section of the configuration."""
    return {f"{section}.{name}": value for name, value in options.items()}


def sgd(rate: float, decay: float, *, nesterov: bool = False) -> Settings:
    """The decay is for all parameters."""
    steps = of("optimizer", kind="sgd", learning_rate=rate, momentum=0.9, nesterov=nesterov)
    return steps | of("optimizer", weight_decay=decay, decay_all=True)


IMAGENET_COLOURS = of("data", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CROPS_OF_224 = IMAGENET_COLOURS | of(
    "data", pad=0, flip=True, image_size=224, resize=256, crop_scale=(0.08, 1.0)
)
RESNET12 = of("model", backbone="resnet12", widths=(64, 160, 320, 640))
RESNET50 = of("model", backbone="resnet50", widths=(64, 128, 256, 512), pooling="mean")
RESNET32 = of("model", backbone="resnet32", widths=(16, 32, 64), pooling="mean")
# Images of the training sets, and full batches of 128 or 1024 in them.
CIFAR100, IMAGENET200, IMAGENET = 50000 // 128, 100000 // 128, 1281167 // 1024


def _integration(batch_size: int) -> Settings:
    return (
        RESNET12
        | of("evaluation", ways=5, shots=(1, 5), queries=15)
        | {"loss.stop_gradient": False, "sampling.batch_size": batch_size}
    )


_A = {
    **dict.fromkeys(["mini-imagenet", "tiered-imagenet", "cifar-fs"], _integration(512)),
    "cub": _integration(128),
    "inat2017": _integration(512) | of("loss", name="spectral:sce+nca", power=0.5),
}


def _groups(images: int, epochs: int, drops: tuple[int, ...]) -> Settings:
    """A row of Table B.1: training images, epochs T, and those at which the rate is divided."""
    epoch = images // 256
    steps = tuple(drop * epoch for drop in drops)
    return (
        CROPS_OF_224
        | RESNET50
        | sgd(0.1, 1e-4)
        | of("optimizer", schedule="step", decay_steps=steps, warmup_steps=0)
        | {"sampling.batch_size": 256, "steps": epochs * epoch}
    )


_B = {
    "imagenet-groups": _groups(1281167, 120, (30, 60, 90)),
    "food101-groups": _groups(75750, 180, (60, 120, 150)),
    "caltech256-groups": _groups(256 * 60, 300, (120, 240, 270)),
    "sun397-groups": _groups(397 * 50, 300, (120, 240, 270)),
}


def _tail(images: float, classes: int, imbalance: float = 0.01) -> int:
    """Full batches of 128 in a long tail n_c = n_max f^(c / (C - 1)), n_max = N / C."""
    sizes = (images / classes * imbalance ** (c / (classes - 1)) for c in range(classes))
    return sum(int(size + 1e-9) for size in sizes) // 128


def _balanced(epoch: int, dim: int, colours: Settings) -> Settings:
    return (
        sgd(0.01, 1e-4)
        | of("data", pad=4, flip=True)
        | RESNET32
        | of("model", shortcut="conv3x3", projection="linear", dim=dim)
        | of("loss", criterion="prototype", reduction="sum")
        | of("optimizer", schedule="step", decay_steps=(100 * epoch, 200 * epoch))
        | {"sampling.batch_size": 128, "steps": 250 * epoch, "evaluation.calibration": "cosines"}
        | colours
    )


def _long_tailed(epoch: int, data: Settings, widths: tuple[int, ...] = (16, 32, 64)) -> Settings:
    return (
        sgd(0.1, 2e-4)
        | of("data", flip=True, mixup=1.0, imbalance=0.01, tail_from="mean")
        | RESNET32
        | of("model", widths=widths, shortcut="pad", dim=0, projection="norm")
        | of("loss", criterion="dot-regression", lengths="batch", reduction="mean")
        | of("optimizer", schedule="step", decay_steps=(160 * epoch, 180 * epoch))
        | of("optimizer", warmup_steps=5 * epoch, warmup_from=0.02 / 0.1)
        | {"sampling.batch_size": 128, "steps": 200 * epoch, "evaluation.calibration": "cosines"}
        | data
    )


_ON_IMAGENET = (
    IMAGENET_COLOURS
    | of("data", pad=0, resize=256, crop_scale=(0.08, 1.0), flip=True, mixed_labels="larger")
    | of("model", pooling="mean", dim=512)
    | of("optimizer", weight_decay=2e-5, decay_all=True, schedule="cosine")
    | of("optimizer", warmup_steps=5 * IMAGENET, warmup_from=0.01)
    | {"sampling.batch_size": 1024, "loss.criterion": "prototype"}
    | {"evaluation.calibration": "cosines"}
)
_CIFAR_LT = of("data", pad=4, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
_HALF = of("data", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
_CIFAR100_COLOURS = of("data", mean=(0.507, 0.487, 0.441), std=(0.267, 0.256, 0.276))

_C = {
    "cifar100-sphere": _balanced(CIFAR100, 64, _CIFAR100_COLOURS),
    "imagenet200-sphere": _balanced(IMAGENET200, 50, IMAGENET_COLOURS),
    "imagenet-sphere": _ON_IMAGENET
    | RESNET50
    | sgd(0.5, 2e-5)
    | {"data.mixup": 1.0, "steps": 100 * IMAGENET},
    "imagenet-sphere-swin": _ON_IMAGENET
    | of("model", backbone="swin", widths=(96, 192, 384, 768))
    | of("optimizer", kind="adamw", learning_rate=0.001),
    "cifar10-lt": _long_tailed(_tail(50000, 10), _CIFAR_LT),
    "cifar100-lt": _long_tailed(_tail(50000, 100), _CIFAR_LT, (32, 64, 128)),
    # With extra.
    "svhn-lt": _long_tailed(_tail(73257 + 531131, 10), _HALF | {"data.name": "svhn_extra"}),
    "stl10-lt": _long_tailed(_tail(5000, 10), _HALF),
}

_TEMPERATURES = of("loss", name="two-way", positive_temperature=4.0, negative_temperature=1.0)


def _two_way(images: int) -> Settings:
    return (
        _TEMPERATURES
        | RESNET50
        | CROPS_OF_224
        | sgd(0.01, 1e-4, nesterov=True)
        | of("data", color_jitter=0.4, lighting=0.1)
        | of("optimizer", schedule="cosine", backbone_rate=0.1)
        | {"sampling.batch_size": 512, "steps": 40 * (images // 512)}
    )


_D = {
    "coco": _two_way(82081),
    "voc2007": _two_way(5011),
    "nus-wide": _two_way(125448),
    "imagenet-two-way": _TEMPERATURES | RESNET50 | {"data.name": "imagenet"},
}

_COMMON = (
    of("data", holdout=0.0, mean=(0.507, 0.487, 0.441), std=(0.267, 0.257, 0.276))
    | of("data", pad=0, flip=True, color_jitter=0.4, resize_to_square=True, lighting=0.0)
    | of("data", crop_scale=(0.08, 1.0), mixup=0.0)
    | of("sampling", batch_size=256, strategy="random")
    | of("loss", scale=0.0, label_smoothing=0.0)
    | of("optimizer", kind="adam", learning_rate=3e-3, decay_all=True, schedule="cosine")
    | of("optimizer", warmup_from=1 / 16, decay_steps=(), backbone_rate=1.0)
    | of("evaluation", ways=5, shots=(1, 5), queries=16, episodes=600, classifier="same")
    | of("evaluation", selection="fine-tuned", validation_shots=5, validation_episodes=100)
    | of("fine_tuning", scale=5.0, margin=0.0, passes=100, batch_size=4, learning_rate=0.01)
    | of("fine_tuning", momentum=0.9, dampening=0.9, weight_decay=1e-3)
    | {"model.pooling": "mean", "report_last": True}
)
_RESNET12 = RESNET12 | of("data", image_size=84, resize=int(84 * 1.15))
_RESNET18 = of("model", backbone="resnet18", widths=(64, 128, 256, 512)) | of(
    "data", image_size=224, resize=int(224 * 1.15)
)
_NO_DROPS = of("model", drop_block=0.0, dropout=0.0)


def _epochs(epoch: int, epochs: int, novel: str = "") -> Settings:
    """A quarter of the epochs to warm up, and a validation every 20."""
    warmup = {"optimizer.warmup_steps": epochs // 4 * epoch, "validate_every": 20 * epoch}
    return warmup | {"data.novel": novel, "steps": epochs * epoch}


def _drops(rate: float, size: int) -> Settings:
    """DropBlock in the last two stages, and dropout of the same rate in the first two."""
    return of(
        "model", drop_block=rate, dropout=rate, drop_block_size=size, drop_block_steps=20 * 2000
    )


def _pair(loss: str, weight_decay: float, margin: float) -> Settings:
    """What the authors chose for each loss and number of shots."""
    return {"loss.name": loss, "optimizer.weight_decay": weight_decay, "loss.margin": margin}


_MINI18 = _COMMON | _epochs(38400 // 256, 400) | _RESNET18
_MINI12 = _COMMON | _epochs(38400 // 256, 400) | _RESNET12 | _drops(0.1, 5)
_CUB = _COMMON | _epochs(23, 200) | _RESNET18
_CROSS = _COMMON | _epochs(235, 400, "cub_fewshot@257") | _RESNET18 | _NO_DROPS

_E = {
    "mini-imagenet-margin": _MINI18 | _drops(0.2, 3) | _pair("cosine", 5e-5, -0.05),
    "mini-imagenet-margin-5shot": _MINI18 | _drops(0.2, 3) | _pair("cosine", 1e-4, -0.02),
    "mini-imagenet-margin-softmax": _MINI18 | _NO_DROPS | _pair("softmax", 1e-4, -0.3),
    "mini-imagenet-margin-softmax-5shot": _MINI18 | _NO_DROPS | _pair("softmax", 5e-5, -0.3),
    "mini-imagenet-margin-resnet12": _MINI12 | _pair("cosine", 1e-4, -0.02),
    "mini-imagenet-margin-resnet12-5shot": _MINI12 | _pair("cosine", 1e-4, -0.01),
    "mini-imagenet-margin-resnet12-softmax": _MINI12 | _pair("softmax", 3e-4, -0.01),
    "mini-imagenet-margin-resnet12-softmax-5shot": _MINI12 | _pair("softmax", 1e-5, -0.1),
    "cub-margin": _CUB | _drops(0.1, 5) | _pair("cosine", 5e-4, -0.01),
    "cub-margin-5shot": _CUB | _drops(0.1, 5) | _pair("cosine", 1e-3, -0.01),
    "cub-margin-softmax": _CUB | _NO_DROPS | _pair("softmax", 5e-3, -0.05),
    "cub-margin-softmax-5shot": _CUB | _NO_DROPS | _pair("softmax", 3e-3, -0.005),
    "mini-imagenet-cub": _CROSS | _pair("cosine", 5e-5, -0.05),
    "mini-imagenet-cub-softmax": _CROSS | _pair("softmax", 1e-6, -0.005),
}

PUBLISHED: dict[str, Settings] = _A | _B | _C | _D | _E
