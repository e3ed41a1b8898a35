"""What the presets of protocol D on photographs share: a pretrained ResNet-50, SGD at 224.

The classifier learns at 0.01 and the backbone at a tenth of it, from weights that you give with
`--model.weights` (a file of torchvision's ResNet-50 as safetensors, or the directory of a run). A
backbone from scratch needs `--optimizer.backbone-rate 1`, and a learning rate of its own.
"""

from experiments.config import DataConfig, OptimizerConfig, SamplingConfig
from experiments.presets.backbones import RESNET50
from experiments.presets.normalisation import IMAGENET_MEAN, IMAGENET_STD
from experiments.protocols.multi_label import MultiLabelConfig

CONFIG = MultiLabelConfig(
    data=DataConfig(
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        pad=0,
        image_size=224,
        resize=256,
        crop_scale=(0.08, 1.0),
        color_jitter=0.4,
        lighting=0.1,
    ),
    sampling=SamplingConfig(batch_size=512),
    model=RESNET50,
    optimizer=OptimizerConfig(learning_rate=0.01, weight_decay=1e-4, backbone_rate=0.1),
)
