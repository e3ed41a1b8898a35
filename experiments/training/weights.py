"""Initial weights: a backbone from a file, or a backbone and perhaps a classifier from a run.

A file is in the safetensors format, with torchvision's names and shapes of ResNet-18, ResNet-50 and
Swin-T, in any float dtype. The classifier (`fc.*`, of Swin `head.*`) is ignored. With torchvision
installed, this makes such a file:

    from safetensors.torch import save_file
    from torchvision.models import resnet50
    save_file(resnet50(weights="IMAGENET1K_V1").state_dict(), "resnet50.safetensors")

Images must be normalised as for those weights (data.mean 0.485 0.456 0.406, data.std 0.229 0.224
0.225).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.core.config import differences
from experiments.core.errors import ExperimentError
from experiments.core.processes import is_first
from experiments.datasets import share_images
from experiments.training.checkpoints import (
    CHECKPOINTS_FOLDER,
    CheckpointError,
    Checkpoints,
    run_folder,
    some_lines,
)
from experiments.training.step import TrainState

_log = logging.getLogger(__name__)
_SUFFIX = ".safetensors"
_LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
    "position_bias": "relative_position_bias_table",
}
_SWIN_LAYERS = {
    "attention_norm": "norm1",
    "attention/inputs": "attn.qkv",
    "attention/output": "attn.proj",
    "hidden_norm": "norm2",
    "hidden": "mlp.0",
    "output": "mlp.3",
}


class WeightsError(ExperimentError):
    """Weights are missing, damaged, or do not fit the backbone."""


def load_weights(
    path: Path,
    state: TrainState,
    own: Collection[str] | None = (),
    classes: Sequence[str] = (),
    data: str = "",
) -> tuple[TrainState, list[str]]:
    """A first state with the backbone of a file or another run, and its classifier if it fits.

    A path is a file `*.safetensors`, a run directory, or its folder of checkpoints, whose best one
    is used. Of a run with the same `classes`, of data that shares images with `data`, the
    classifier and the entries `own` of the objective state are taken, too, if their names, types
    and shapes are the same; `own` is None if no classifier is trained. A `WeightsError` names
    entries of the backbone that are missing, unexpected, or of another shape. Second, this returns
    and logs a line that says what was taken, after those of the runs that the weights come from.
    """
    params, objective_state = state.params, state.objective_state
    if not path.is_dir():
        if path.suffix != _SUFFIX or not path.is_file():
            raise WeightsError(f"{path} is neither a file *{_SUFFIX} nor a run directory")
        backbone, statistics = _from_file(path, (params["backbone"], state.statistics))
        params = params | {"backbone": backbone}
        return state._replace(params=params, statistics=statistics), [f"Weights: {path}."]
    try:
        with Checkpoints(run_folder(path) / CHECKPOINTS_FOLDER, read_only=True) as checkpoints:
            run, _ = checkpoints.read_intact(best=True)
        bare = {"params": {"backbone": params["backbone"]}, "statistics": state.statistics}
        found = run.fill(bare, ("params/backbone/", "statistics/"))
    except CheckpointError as error:
        raise WeightsError(f"no backbone can be taken from {path}: {error}") from error
    params, line = params | found["params"], ""
    theirs = run.meta.get("classes")
    shared = theirs and share_images(run.meta["config"]["data"]["name"], data)
    if shared and theirs != classes:
        reason = "it has other classes of these images: held-out ones may be among them"
    elif own is None or not (shared and run.meta["classifier"]):
        reason = "the two runs do not both train a classifier of the same classes"
    else:
        reason = "its parameters have other names or shapes"
        kept = {name: objective_state[name] for name in own}
        head = {"params": {"classifier": params["classifier"]}, "objective_state": kept}
        parts = ("params/classifier/", *(f"objective_state/{name}/" for name in own))
        with contextlib.suppress(CheckpointError):
            head = run.fill(head, parts)
            params = params | head["params"]
            objective_state = objective_state | head["objective_state"] if own else objective_state
            line = f"Weights: backbone and classifier of {path}, which has the same classes."
    line = line or f"Weights: backbone of {path}, without its classifier: {reason}."
    if is_first():
        _log.warning("%s", line)
    taken = jax.tree.map(jnp.asarray, (params, found["statistics"], objective_state))
    state = state._replace(params=taken[0], statistics=taken[1], objective_state=taken[2])
    return state, [*run.meta.get("origins", ()), line]


def _from_file(path: Path, trees: Any) -> Any:
    """The parameters and the statistics of a backbone, with the values of a file."""
    stored = {name: array for name, array in _read(path).items() if not _ignored(name)}
    places, structure = jax.tree_util.tree_flatten_with_path(trees)
    axes, wanted = {}, {}
    for (_, *place), leaf in places:
        keys = jax.tree_util.keystr(tuple(place), simple=True, separator="/").split("/")
        keys = keys[:-1] if keys[-1] == "value" else keys
        name, order = _torchvision_name(keys), [*range(leaf.ndim)]
        if keys[-1] == "kernel":  # PyTorch's are [out, in, h, w] or [out, in].
            order = {4: [2, 3, 1, 0], 2: [1, 0]}[leaf.ndim]
        axes[name] = order
        wanted[name] = str([leaf.shape[order.index(axis)] for axis in range(leaf.ndim)])
    found = {
        name: str([*array.shape]) if jnp.issubdtype(array.dtype, jnp.floating) else "no floats"
        for name, array in stored.items()
    }
    if lines := differences(found, wanted):
        raise WeightsError(
            f"{path} does not fit the backbone (left: the file, right: the backbone):"
            f"{some_lines(lines)}"
        )
    values = [
        jnp.asarray(stored[name].astype(np.float32).transpose(order))
        for name, order in axes.items()
    ]
    return jax.tree.unflatten(structure, values)


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise WeightsError(
            f"reading {path} needs the package safetensors: "
            'pip install "jaxloss[weights]", or pip install safetensors'
        ) from error
    try:
        return load_file(path)
    except Exception as error:  # A SafetensorError, an OSError, and a KeyError of unknown dtypes.
        raise WeightsError(
            f"{path} is damaged, or has types that NumPy lacks: {error!r}"
        ) from error


def _torchvision_name(keys: list[str]) -> str:
    """torchvision's name for a leaf of the state of a `ResNet` or a `Swin`."""
    match keys:
        case ["stem", kind, leaf]:
            layer = {"conv": "conv1", "norm": "bn1"}[kind]
        case ["stages", stage, block, "layers", number, kind, leaf]:
            layer = {"conv": "conv", "norm": "bn"}[kind] + str(int(number) + 1)
            layer = f"layer{int(stage) + 1}.{block}.{layer}"
        case ["stages", stage, block, "shortcut", kind, leaf]:
            number = {"conv": 0, "norm": 1}[kind]
            layer = f"layer{int(stage) + 1}.{block}.downsample.{number}"
        case ["patch" | "patch_norm" as kind, leaf]:
            layer = {"patch": "features.0.0", "patch_norm": "features.0.2"}[kind]
        case ["stages", stage, block, "attention", "position_bias" as leaf]:
            layer = f"features.{2 * int(stage) + 1}.{block}.attn"
        case ["stages", stage, block, *kind, leaf] if "/".join(kind) in _SWIN_LAYERS:
            layer = f"features.{2 * int(stage) + 1}.{block}.{_SWIN_LAYERS['/'.join(kind)]}"
        case ["merges", stage, "norm" | "reduction" as kind, leaf]:
            layer = f"features.{2 * int(stage) + 2}.{kind}"
        case ["norm", leaf]:
            layer = "norm"
        case other:
            raise WeightsError(
                "a file of weights is for resnet18, resnet50 or swin, and this backbone has "
                f"{'/'.join(other)}; set model.weights to a run directory instead"
            )
    return f"{layer}.{_LEAVES[leaf]}"


def _ignored(name: str) -> bool:
    return name.startswith(("fc.", "head.")) or name.endswith(
        (".num_batches_tracked", ".relative_position_index")
    )
