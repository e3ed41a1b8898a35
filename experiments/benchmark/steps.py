"""Whole training steps: those of `experiments.training` against the same steps in PyTorch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx
from torch import Tensor, nn

from experiments.benchmark.cases import BASE_CLASSES, SizeName
from experiments.benchmark.measure import Form, Row, measure
from experiments.benchmark.torch_forms import direct_sum
from experiments.config import DataConfig, ModelConfig, OptimizerConfig
from experiments.contracts import Problem
from experiments.models import build_backbone
from experiments.protocols.few_shot import objective
from experiments.protocols.integration import IntegratedLoss
from experiments.training import parallel
from experiments.training.optimizer import build_optimizer
from experiments.training.step import Batch, Step, TrainState, build_step, initial_state


class Training(NamedTuple):
    """What is trained."""

    model: ModelConfig
    image_shape: tuple[int, int, int]
    batch_size: int


_CONV4 = ModelConfig(widths=(16, 32, 64, 64))
_RESNET12 = ModelConfig(backbone="resnet12", widths=(64, 160, 320, 640), pooling="mean")

TRAININGS: dict[SizeName, tuple[Training, ...]] = {
    "paper": (
        Training(_CONV4, (32, 32, 1), 128),
        Training(ModelConfig(), (32, 32, 1), 128),
        Training(_RESNET12, (84, 84, 3), 16),
    ),
    "large": (
        Training(ModelConfig(), (84, 84, 3), 64),
        Training(_RESNET12, (84, 84, 3), 64),
    ),
}
"""The networks of the presets for icons and mini-ImageNet. The batches of ResNet-12 are smaller
than its preset's, which would take a CPU a minute a step."""

# Random crops and flips are left out, for PyTorch's users make them in other processes.
_DATA = DataConfig(pad=0, flip=False)
_LOSS = IntegratedLoss(name="direct:sce+nca")
_OPTIMIZER = OptimizerConfig(learning_rate=0.01)
_NEVER_ENDS = 10**9
"""Steps of the schedule, so that the learning rate is constant."""
_STEPS_THAT_AGREE = 3


def measure_steps(size: SizeName) -> Iterator[Row]:
    """Times training steps in both frameworks, from the same parameters on the same batch."""
    for training in TRAININGS.get(size, ()):
        step, state, batch = build(training)
        forms = {
            "jaxloss": jax_steps(step, state, batch),
            "PyTorch": torch_steps(training, state, batch),
        }
        times = measure(forms, few=True, seconds=60.0)
        height, width, channels = training.image_shape
        rates = {
            name: f"{1e3 * training.batch_size / form['fastest_ms']:,.1f}"
            for name, form in times.items()
            if "fastest_ms" in form
        }
        yield Row(
            "Training steps",
            {
                "network": f"{training.model.backbone} {'-'.join(map(str, training.model.widths))}",
                "images": f"{height}×{width}×{channels}",
                "batch": training.batch_size,
            },
            times,
            {
                "images/s": rates["jaxloss"],
                "images/s, PyTorch": rates.get("PyTorch"),
                "temporary memory (MB)": round(forms["jaxloss"].temporary_bytes / 1e6),
            },
        )


def build(training: Training) -> tuple[Step, TrainState, Batch]:
    """The step of one device as a run builds it, its first state, and a batch of random images."""
    rng = np.random.default_rng(0)
    n = training.batch_size
    batch = Batch(
        rng.integers(0, 256, (n, *training.image_shape), np.uint8),
        rng.permutation(np.arange(n) % min(BASE_CLASSES, n // 2)).astype(np.int32),
    )
    axis_name = parallel.axis_name("pmap")
    model = build_backbone(
        training.model, image_shape=training.image_shape, axis_name=axis_name, rngs=nnx.Rngs(0)
    )
    problem = Problem(model.num_features, np.ones(BASE_CLASSES, int), axis_name)
    loss, optimizer = objective(_LOSS, problem), build_optimizer(_OPTIMIZER, _NEVER_ENDS)
    graphdef, state = initial_state(model, loss, optimizer, seed=0)
    key = jax.random.key(0)
    step = build_step(graphdef, loss, optimizer, _DATA, key=key, axis_name=axis_name)
    return step, state, batch


def jax_steps(step: Step, state: TrainState, batch: Batch) -> Form:
    """The step over all devices, as in a run: it goes on from state to state."""
    spread = parallel.data_parallel("pmap", step)
    batch = jax.tree.map(jax.device_put, spread.split(batch))
    state = spread.replicate(state)
    compiled = spread.step.lower(state, batch).compile()
    memory: Any = compiled.memory_analysis()

    def run() -> float:
        nonlocal state
        state, metrics = compiled(state, batch)
        return float(spread.single(metrics)["loss"])

    return Form(run, [run() for _ in range(_STEPS_THAT_AGREE)], memory.temp_size_in_bytes)


def torch_steps(training: Training, state: TrainState, batch: Batch) -> Form:
    """The same in PyTorch, from the same parameters, with `channels_last`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = {"conv4": _Conv4, "resnet12": _ResNet12}[training.model.backbone]
    network = kind((training.image_shape[-1], *training.model.widths))
    values = nnx.to_pure_dict(state.params["backbone"])
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(torch.tensor(_value(values, name.split("."))))
    channels_last: Any = {"memory_format": torch.channels_last}
    network = network.to(device, **channels_last)
    head = [
        torch.tensor(np.asarray(state.params["classifier"][name]), device=device).requires_grad_()
        for name in ("kernel", "bias")
    ]
    labels = torch.tensor(batch.labels, device=device).long()
    images = torch.tensor(np.asarray(batch.images), device=device).permute(0, 3, 1, 2)
    trained = [*network.parameters(), *head]
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=_OPTIMIZER.learning_rate,
        momentum=_OPTIMIZER.momentum,
        nesterov=_OPTIMIZER.nesterov,
        weight_decay=_OPTIMIZER.weight_decay,
    )
    (mean,), (std,) = _DATA.mean, _DATA.std

    def run() -> float:
        features = network((images.float() / 255 - mean) / std)
        value = direct_sum(features, labels, *head)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return value.item()

    return Form(run, [run() for _ in range(_STEPS_THAT_AGREE)])


def _value(values: Any, path: list[str]) -> np.ndarray:
    """The value of the parameter with the path in PyTorch, from those of Flax."""
    *modules, leaf = path
    for name in modules:
        values = values[int(name) if name.isdigit() else name]
    if "kernel" in values:
        return np.array(values["kernel"]).transpose(3, 2, 0, 1)
    return np.array(values["scale" if leaf == "weight" else leaf])


# The networks as PyTorch's users write them, with the names of `experiments.models`.


def _conv_norm(channels_in: int, channels_out: int, kernel: int = 3) -> nn.Module:
    padding = kernel // 2
    conv = nn.Conv2d(channels_in, channels_out, kernel, padding=padding, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(channels_out)))


class _Conv4(nn.Module):
    def __init__(self, channels: Sequence[int]):
        super().__init__()
        self.layers = nn.ModuleList(_conv_norm(*pair) for pair in pairwise(channels))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(F.max_pool2d(layer(x), 2), inplace=True)
        # In `channels_last`, positions come before channels.
        return x.permute(0, 2, 3, 1).flatten(1)


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels_out: int):
        super().__init__()
        self.first = _conv_norm(channels_in, channels_out)
        self.second = _conv_norm(channels_out, channels_out)
        self.third = _conv_norm(channels_out, channels_out)
        self.shortcut = _conv_norm(channels_in, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.first(x), 0.1, inplace=True)
        y = F.leaky_relu(self.second(y), 0.1, inplace=True)
        y = self.third(y) + self.shortcut(x)
        return F.leaky_relu(F.max_pool2d(y, 2), 0.1, inplace=True)


class _ResNet12(nn.Module):
    def __init__(self, channels: Sequence[int]):
        super().__init__()
        self.blocks = nn.Sequential(*(_Block(*pair) for pair in pairwise(channels)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).mean((2, 3))
