"""What a trained state computes for images: features, and logits on request."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.config import DataConfig
from experiments.contracts import ImageSet, Loss, Objective
from experiments.errors import DivergedError
from experiments.training.step import TrainState, build_outputs, extract_features


def test_extraction_names_its_problems():
    images = np.zeros((5, 4, 4, 1), np.uint8)
    with pytest.raises(ValueError, match="there is no image to extract features from"):
        extract_features(lambda x: x, images[:0])
    with pytest.raises(ValueError, match=r"must return \[2, d\], got \[2, 4, 4, 1\]"):
        extract_features(jnp.asarray, images, batch_size=2)


class _MeanPixel(nnx.Module):
    """One feature: a parameter divided by the mean of the pixels."""

    def __init__(self):
        self.factor = nnx.Param(jnp.ones(()))

    def __call__(self, images, *, train, keys=None):
        return self.factor[...] / images.mean(axis=(1, 2, 3))[:, None]


GRAPHDEF, PARAMS, STATISTICS = nnx.split(_MeanPixel(), nnx.Param, ...)
STATE = TrainState(
    step=jnp.int32(5),
    params={"backbone": PARAMS, "classifier": {"kernel": jnp.float32([[2.0, -1.0]])}},
    statistics=STATISTICS,
    opt_state=(),
    objective_state={"shift": jnp.float32([0.5, 0.0])},
)
OBJECTIVE = Objective(
    init_head=lambda key: {},
    loss=lambda features, labels, head, state: Loss(jnp.zeros(()), state, {}),
    logits=lambda features, head, state: jnp.sqrt(features @ head["kernel"] + state["shift"]),
)
DATA = DataConfig(mean=(0.0,), std=(1.0,))


def images_of(*pixels: int) -> ImageSet:
    images = np.tile(np.array(pixels, np.uint8)[:, None, None, None], (1, 2, 2, 1))
    return ImageSet(images, np.arange(len(pixels), dtype=np.int32), ("a", "b"))


def test_outputs_have_the_features_and_the_objectives_logits():
    objective = OBJECTIVE._replace(
        logits=lambda x, head, state: x @ head["kernel"] + state["shift"]
    )
    class_counts = np.array([4, 9])
    outputs = build_outputs(GRAPHDEF, objective, DATA, class_counts)(STATE, images_of(51, 204))
    np.testing.assert_allclose(outputs.features, [[5.0], [1.25]], rtol=1e-6)
    np.testing.assert_allclose(outputs.logits(), [[10.5, -5.0], [3.0, -1.25]], rtol=1e-6)
    assert outputs.labels.tolist() == [0, 1]
    assert outputs.class_counts is class_counts
    assert outputs.objective_state is STATE.objective_state
    assert outputs.head is STATE.params["classifier"]


def test_a_value_that_is_not_finite_ends_the_run():
    outputs_of = build_outputs(GRAPHDEF, OBJECTIVE, DATA, np.ones(2, int))
    # 1 / 0 is infinite, for the second image alone.
    with pytest.raises(DivergedError, match="a feature of an image is not finite at step 5"):
        outputs_of(STATE, images_of(51, 0))
    # The features are finite, and one of the logits is the root of a negative number.
    outputs = outputs_of(STATE, images_of(51))
    with pytest.raises(DivergedError, match="a logit of an image is not finite at step 5"):
        outputs.logits()
