"""Whole training steps: those of `experiments.training` against the same steps in PyTorch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from experiments.benchmark.cases import SizeName
from experiments.benchmark.measure import interleave, num_cores
from experiments.config import DataConfig, ModelConfig, OptimizerConfig
from experiments.contracts import Objective, Problem
from experiments.models import build_backbone
from experiments.protocols.few_shot import objective
from experiments.protocols.integration import IntegratedLoss
from experiments.training import parallel
from experiments.training.optimizer import build_optimizer
from experiments.training.state import TrainState, initial_state
from experiments.training.step import Batch, Step, build_step


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
_CLASSES, _FEWEST_IMAGES = 64, 2
_STEPS_THAT_AGREE = 3
_TOLERANCE = 1e-3
_TORCH, _LOSS_ALONE, _TORCH_LOSS_ALONE = "PyTorch", "loss alone", "PyTorch's loss alone"


class Parts(NamedTuple):
    """A training of this project, ready to be compiled."""

    step: Step
    """Of one device among several."""
    state: TrainState
    batch: Batch
    objective: Objective
    """On one device."""
    num_features: int


class Steps(NamedTuple):
    """A training that runs on and on, on one batch."""

    run: Callable[[], float]
    """Makes a step, and returns the loss before it."""
    loss_alone: Callable[[], object]
    """Computes the loss and its gradient from features."""
    temporary_bytes: int | None = None
    """Most memory that a step holds beside the state and the batch."""


def measure_steps(size: SizeName, *, repeats: int) -> list[dict[str, Any]]:
    """Times training steps, and the loss and its gradient alone."""
    return [measure_training(training, repeats=repeats) for training in TRAININGS.get(size, ())]


def measure_training(training: Training, *, repeats: int) -> dict[str, Any]:
    """A training in both frameworks; PyTorch's is timed if its first losses agree."""
    parts = build(training)
    ours = jax_steps(parts)
    runs: dict[str, Callable[[], Any]] = {"jaxloss": ours.run, _LOSS_ALONE: ours.loss_alone}
    failures = {}
    losses = [ours.run() for _ in range(_STEPS_THAT_AGREE)]
    if importlib.util.find_spec("torch"):
        theirs = torch_steps(training, parts)
        difference = np.max([abs(theirs.run() / loss - 1) for loss in losses])
        if difference <= _TOLERANCE:
            runs |= {_TORCH: theirs.run, _TORCH_LOSS_ALONE: theirs.loss_alone}
        else:
            text = f"differs by {difference:.1g} after {_STEPS_THAT_AGREE} steps"
            failures[_TORCH] = {"failure": text}
    times = interleave(runs, repeats=repeats, seconds=60.0)
    fastest = {name: form["fastest_ms"] for name, form in times.items()}
    height, width, channels = training.image_shape
    widths = "-".join(map(str, training.model.widths))
    return {
        "problem": {
            "network": f"{training.model.backbone} {widths}",
            "images": f"{height}×{width}×{channels}",
            "batch": training.batch_size,
        },
        "forms": {name: times[name] for name in ("jaxloss", _TORCH) if name in times} | failures,
        "result": {
            "images/s": _rate(training, fastest, "jaxloss"),
            "images/s, PyTorch": _rate(training, fastest, _TORCH),
            "loss": _share(fastest, _LOSS_ALONE, "jaxloss"),
            "loss, PyTorch": _share(fastest, _TORCH_LOSS_ALONE, _TORCH),
            "temporary memory (MB)": (
                None if ours.temporary_bytes is None else round(ours.temporary_bytes / 1e6)
            ),
        },
    }


def _rate(training: Training, fastest: dict[str, float], name: str) -> str | None:
    if name not in fastest:
        return None
    rate = 1e3 * training.batch_size / fastest[name]
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _share(fastest: dict[str, float], part: str, whole: str) -> str | None:
    return f"{100 * fastest[part] / fastest[whole]:.1f} %" if whole in fastest else None


def build(training: Training) -> Parts:
    """The training as a run builds it, with random images."""
    rng = np.random.default_rng(0)
    n = training.batch_size
    classes = max(min(_CLASSES, n // _FEWEST_IMAGES), 1)
    batch = Batch(
        rng.integers(0, 256, (n, *training.image_shape), np.uint8),
        rng.permutation(np.arange(n) % classes).astype(np.int32),
    )
    axis_name = parallel.axis_name("pmap")
    model = build_backbone(
        training.model, image_shape=training.image_shape, axis_name=axis_name, rngs=nnx.Rngs(0)
    )
    problem = Problem(model.num_features, np.ones(_CLASSES, int))
    spread = objective(_LOSS, problem._replace(axis_name=axis_name))
    optimizer = build_optimizer(_OPTIMIZER, _NEVER_ENDS)
    graphdef, state = initial_state(model, spread, optimizer, seed=0)
    step = build_step(
        graphdef, spread, optimizer, _DATA, key=jax.random.key(0), axis_name=axis_name
    )
    return Parts(step, state, batch, objective(_LOSS, problem), model.num_features)


def _random_features(parts: Parts) -> np.ndarray:
    rng = np.random.default_rng(1)
    return rng.normal(size=(len(parts.batch.labels), parts.num_features)).astype(np.float32)


def jax_steps(parts: Parts) -> Steps:
    """The step over all devices, as in a run, and the loss alone on one, compiled."""
    spread = parallel.data_parallel("pmap", parts.step)
    batch = jax.tree.map(jax.device_put, spread.split(parts.batch))
    state = spread.replicate(parts.state)
    step = spread.step.lower(state, batch).compile()

    def run() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(spread.single(metrics)["loss"])

    def loss(features, head):
        return parts.objective.loss(features, parts.batch.labels, head, ()).value

    head = parts.state.params["classifier"]
    arguments = jax.device_put((_random_features(parts), head))
    alone = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile()
    memory = step.memory_analysis()
    return Steps(
        run,
        lambda: jax.block_until_ready(alone(*arguments)),
        None if memory is None else memory.temp_size_in_bytes,
    )


def torch_steps(training: Training, parts: Parts) -> Steps:
    """The same in PyTorch, from the same parameters, with `channels_last`."""
    import torch

    from experiments.benchmark.torch_backbones import build_network
    from experiments.benchmark.torch_forms import direct_sum_loss

    torch.set_num_threads(num_cores())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = build_network(training.model, training.image_shape[-1])
    values = nnx.to_pure_dict(parts.state.params["backbone"])
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(torch.tensor(_value(values, name.split("."))))
    channels_last: Any = {"memory_format": torch.channels_last}
    network = network.to(device, **channels_last)
    head = [
        torch.tensor(np.asarray(parts.state.params["classifier"][name]), device=device)
        for name in ("kernel", "bias")
    ]
    labels = torch.tensor(parts.batch.labels, device=device).long()
    images = torch.tensor(np.asarray(parts.batch.images), device=device).permute(0, 3, 1, 2)
    trained = [*network.parameters(), *(parameter.requires_grad_() for parameter in head)]
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
        value = direct_sum_loss(features, labels, *head)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return value.item()

    features = torch.tensor(_random_features(parts), device=device, requires_grad=True)

    def loss_alone() -> object:
        value = direct_sum_loss(features, labels, *head)
        gradients = torch.autograd.grad(value, [features, *head])
        return value.item(), gradients

    return Steps(run, loss_alone)


def _value(values: Any, path: list[str]) -> np.ndarray:
    """The value of the parameter with the path in PyTorch, from those of Flax."""
    *modules, leaf = path
    for name in modules:
        values = values[int(name) if name.isdigit() else name]
    if "kernel" in values:
        return np.array(values["kernel"]).transpose(3, 2, 0, 1)
    return np.array(values["scale" if leaf == "weight" else leaf])
