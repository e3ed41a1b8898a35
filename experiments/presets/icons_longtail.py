"""Protocol C on a long tail of the icons."""

from dataclasses import replace

from experiments.presets import icons_sphere
from experiments.protocols.hyperspherical import HypersphericalLossConfig

DESCRIPTION = "Hyperspherical classification on a long tail of the icons (56 to 2 images a class)."
CONFIG = replace(
    icons_sphere.CONFIG,
    data=replace(icons_sphere.CONFIG.data, imbalance=0.05, mixup=1.0),
    optimizer=replace(icons_sphere.CONFIG.optimizer, learning_rate=0.1),
    loss=HypersphericalLossConfig(criterion="dot-regression"),
    steps=1200,
)
