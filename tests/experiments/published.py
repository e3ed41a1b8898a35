"""The published settings of the protocols, by preset; a copy that changes only with its source.

The sources are those that the files of the presets name. In protocol E, the authors' last batch of
an epoch is smaller: 5,885 images give 23 batches of 256, and 60,000 give 235.
"""

SGD = "optimizer.kind=sgd optimizer.momentum=0.9 optimizer.nesterov=false optimizer.decay_all=true "
COLOURS = "data.mean=0.485+0.456+0.406 data.std=0.229+0.224+0.225 "
CROPS = COLOURS + "data.pad=0 data.flip=true data.resize=256 data.crop_scale=0.08+1 "
RESNET12 = "model.backbone=resnet12 model.widths=64+160+320+640 "
RESNET50 = "model.backbone=resnet50 model.widths=64+128+256+512 model.pooling=mean "
RESNET32 = "model.backbone=resnet32 model.pooling=mean "

_A = RESNET12 + "evaluation.ways=5 evaluation.shots=1+5 evaluation.queries=15 "
_A += "loss.stop_gradient=false sampling.batch_size="
PUBLISHED = dict.fromkeys(("mini-imagenet", "tiered-imagenet", "cifar-fs"), _A + "512")
PUBLISHED |= {"cub": _A + "128", "inat2017": _A + "512 loss.name=spectral:sce+nca loss.power=0.5"}

# Training images, epochs T, and those at which the rate is divided.
_ROWS_OF_TABLE_B1 = {
    "imagenet-groups": (1281167, 120, (30, 60, 90)),
    "food101-groups": (75750, 180, (60, 120, 150)),
    "caltech256-groups": (256 * 60, 300, (120, 240, 270)),
    "sun397-groups": (397 * 50, 300, (120, 240, 270)),
}
for _name, (_images, _epochs, _drops) in _ROWS_OF_TABLE_B1.items():
    _epoch = _images // 256
    PUBLISHED[_name] = (
        f"{CROPS}{RESNET50}{SGD}data.image_size=224 sampling.batch_size=256 "
        "optimizer.learning_rate=0.1 optimizer.weight_decay=1e-4 optimizer.schedule=step "
        f"optimizer.decay_steps={'+'.join(str(drop * _epoch) for drop in _drops)} "
        f"optimizer.warmup_steps=0 steps={_epochs * _epoch}"
    )


def _balanced(epoch: int, dim: int) -> str:
    return (
        f"{SGD}{RESNET32}model.widths=16+32+64 model.shortcut=conv3x3 model.projection=linear "
        f"model.dim={dim} data.pad=4 data.flip=true loss.criterion=prototype loss.reduction=sum "
        "optimizer.learning_rate=0.01 optimizer.weight_decay=1e-4 optimizer.schedule=step "
        f"optimizer.decay_steps={100 * epoch}+{200 * epoch} sampling.batch_size=128 "
        f"steps={250 * epoch} evaluation.calibration=cosines "
    )


def _tail(images: float, classes: int, data: str, widths: str = "16+32+64") -> str:
    """A long tail n_c = n_max f^(c / (C - 1)), n_max = N / C, f = 0.01, in full batches of 128."""
    sizes = (images / classes * 0.01 ** (c / (classes - 1)) for c in range(classes))
    epoch = sum(int(size + 1e-9) for size in sizes) // 128
    return (
        f"{SGD}{RESNET32}model.widths={widths} model.shortcut=pad model.dim=0 "
        "model.projection=norm data.flip=true data.mixup=1 data.imbalance=0.01 data.tail_from=mean "
        "loss.criterion=dot-regression loss.lengths=batch loss.reduction=mean "
        "optimizer.learning_rate=0.1 optimizer.weight_decay=2e-4 optimizer.schedule=step "
        f"optimizer.decay_steps={160 * epoch}+{180 * epoch} optimizer.warmup_steps={5 * epoch} "
        f"optimizer.warmup_from=0.2 sampling.batch_size=128 steps={200 * epoch} "
        f"evaluation.calibration=cosines {data}"
    )


_ON_IMAGENET = (
    f"{CROPS}data.mixed_labels=larger model.pooling=mean model.dim=512 sampling.batch_size=1024 "
    "loss.criterion=prototype optimizer.weight_decay=2e-5 optimizer.decay_all=true "
    f"optimizer.schedule=cosine optimizer.warmup_steps={5 * (1281167 // 1024)} "
    "optimizer.warmup_from=0.01 evaluation.calibration=cosines "
)
_CIFAR_LT = "data.pad=4 data.mean=0.4914+0.4822+0.4465 data.std=0.2023+0.1994+0.2010"
_HALF = "data.mean=0.5+0.5+0.5 data.std=0.5+0.5+0.5"
PUBLISHED |= {
    "cifar100-sphere": _balanced(50000 // 128, 64)
    + "data.mean=0.507+0.487+0.441 data.std=0.267+0.256+0.276",
    "imagenet200-sphere": _balanced(100000 // 128, 50) + COLOURS,
    "imagenet-sphere": f"{_ON_IMAGENET}{RESNET50}{SGD}optimizer.learning_rate=0.5 data.mixup=1 "
    f"steps={100 * (1281167 // 1024)}",
    "imagenet-sphere-swin": f"{_ON_IMAGENET}model.backbone=swin model.widths=96+192+384+768 "
    "optimizer.kind=adamw optimizer.learning_rate=0.001",
    "cifar10-lt": _tail(50000, 10, _CIFAR_LT),
    "cifar100-lt": _tail(50000, 100, _CIFAR_LT, "32+64+128"),
    # With extra.
    "svhn-lt": _tail(73257 + 531131, 10, f"{_HALF} data.name=svhn_extra"),
    "stl10-lt": _tail(5000, 10, _HALF),
}

_TWO_WAY = "loss.name=two-way loss.positive_temperature=4 loss.negative_temperature=1 " + RESNET50
for _name, _images in {"coco": 82081, "voc2007": 5011, "nus-wide": 125448}.items():
    PUBLISHED[_name] = (
        f"{_TWO_WAY}{CROPS}data.image_size=224 data.color_jitter=0.4 data.lighting=0.1 "
        "optimizer.kind=sgd optimizer.momentum=0.9 optimizer.nesterov=true "
        "optimizer.decay_all=true optimizer.learning_rate=0.01 optimizer.weight_decay=1e-4 "
        "optimizer.schedule=cosine optimizer.backbone_rate=0.1 sampling.batch_size=512 "
        f"steps={40 * (_images // 512)}"
    )
PUBLISHED["imagenet-two-way"] = _TWO_WAY + "data.name=imagenet"

_E = (
    "data.holdout=0 data.mean=0.507+0.487+0.441 data.std=0.267+0.257+0.276 data.pad=0 "
    "data.flip=true data.color_jitter=0.4 data.resize_to_square=true data.lighting=0 data.mixup=0 "
    "data.crop_scale=0.08+1 sampling.batch_size=256 sampling.strategy=random loss.scale=0 "
    "loss.label_smoothing=0 optimizer.kind=adam optimizer.learning_rate=0.003 "
    "optimizer.decay_all=true optimizer.schedule=cosine optimizer.warmup_from=0.0625 "
    "optimizer.backbone_rate=1 evaluation.ways=5 evaluation.shots=1+5 evaluation.queries=16 "
    "evaluation.episodes=600 evaluation.classifier=same evaluation.selection=fine-tuned "
    "evaluation.validation_shots=5 evaluation.validation_episodes=100 fine_tuning.scale=5 "
    "fine_tuning.margin=0 fine_tuning.passes=100 fine_tuning.batch_size=4 "
    "fine_tuning.learning_rate=0.01 fine_tuning.momentum=0.9 fine_tuning.dampening=0.9 "
    "fine_tuning.weight_decay=0.001 model.pooling=mean report_last=true "
)
_NETWORKS = {
    12: RESNET12 + f"data.image_size=84 data.resize={int(84 * 1.15)} ",
    18: "model.backbone=resnet18 model.widths=64+128+256+512 data.image_size=224 "
    f"data.resize={int(224 * 1.15)} ",
}
# Batches of an epoch, epochs, and the novel set.
_SETS = {
    "mini-imagenet-margin": (38400 // 256, 400, ""),
    "cub-margin": (23, 200, ""),
    "mini-imagenet-cub": (235, 400, "data.novel=cub_fewshot@257 "),
}
# Layers, loss, weight decay and margin, and rate and size of DropBlock: in the last two stages, and
# dropout of the same rate in the first two.
_ROWS = {
    "mini-imagenet-margin": (18, "cosine", "5e-5", -0.05, (0.2, 3)),
    "mini-imagenet-margin-5shot": (18, "cosine", "1e-4", -0.02, (0.2, 3)),
    "mini-imagenet-margin-softmax": (18, "softmax", "1e-4", -0.3, None),
    "mini-imagenet-margin-softmax-5shot": (18, "softmax", "5e-5", -0.3, None),
    "mini-imagenet-margin-resnet12": (12, "cosine", "1e-4", -0.02, (0.1, 5)),
    "mini-imagenet-margin-resnet12-5shot": (12, "cosine", "1e-4", -0.01, (0.1, 5)),
    "mini-imagenet-margin-resnet12-softmax": (12, "softmax", "3e-4", -0.01, (0.1, 5)),
    "mini-imagenet-margin-resnet12-softmax-5shot": (12, "softmax", "1e-5", -0.1, (0.1, 5)),
    "cub-margin": (18, "cosine", "5e-4", -0.01, (0.1, 5)),
    "cub-margin-5shot": (18, "cosine", "1e-3", -0.01, (0.1, 5)),
    "cub-margin-softmax": (18, "softmax", "5e-3", -0.05, None),
    "cub-margin-softmax-5shot": (18, "softmax", "3e-3", -0.005, None),
    "mini-imagenet-cub": (18, "cosine", "5e-5", -0.05, None),
    "mini-imagenet-cub-softmax": (18, "softmax", "1e-6", -0.005, None),
}
for _name, (_layers, _loss, _decay, _margin, _drop) in _ROWS.items():
    _epoch, _epochs, _novel = next(of for name, of in _SETS.items() if _name.startswith(name))
    _rate, _size = _drop or (0, 5)
    PUBLISHED[_name] = (
        f"{_E}{_NETWORKS[_layers]}{_novel}loss.name={_loss} optimizer.weight_decay={_decay} "
        f"loss.margin={_margin} model.drop_block={_rate} model.dropout={_rate} "
        f"model.drop_block_size={_size} model.drop_block_steps={40000 if _drop else 0} "
        # A quarter of the epochs to warm up, and a validation every 20.
        f"optimizer.warmup_steps={_epochs // 4 * _epoch} validate_every={20 * _epoch} "
        f"steps={_epochs * _epoch}"
    )
