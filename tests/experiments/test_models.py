"""Backbones: what the comparison with PyTorch does not show."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from experiments.core.config import ModelConfig
from experiments.core.errors import ConfigError
from experiments.models import build_backbone, convolution
from experiments.models.convolution import convolve
from experiments.models.layers import drop_after_block, drop_block, dropout
from experiments.papers.presets import shared
from tests.tolerances import FLOAT32

RESNET32 = ModelConfig("resnet32", (4, 8, 12), "mean", blocks=(1, 2, 1))
SMALL = {
    "conv4": ModelConfig("conv4", (4, 6, 8, 10), "mean"),
    "resnet12": ModelConfig("resnet12", (4, 6, 8, 10), "mean"),
    "resnet18": ModelConfig("resnet18", (4, 6, 8, 10), "mean", blocks=(2, 1, 1, 1)),
    "resnet50": ModelConfig("resnet50", (4, 4, 6, 8), "mean", blocks=(1, 2, 1, 1)),
    "resnet32": RESNET32,
    "resnet32, 3x3": replace(RESNET32, shortcut="conv3x3"),
    "wrn28": ModelConfig("wrn28", (16, 8, 10), "mean", blocks=(1, 2, 1)),
    "swin": ModelConfig("swin", (32, 64, 64, 96), "mean", blocks=(2, 1, 1, 1)),
}
RESNET18 = ModelConfig("resnet18", (64, 128, 256, 512), "mean")
WRN_28_10 = ModelConfig("wrn28", (160, 320, 640), "mean")
SIDE = (32, 32, 3)


def build(config, image_shape=SIDE):
    return build_backbone(config, image_shape=image_shape, axis_name=None, rngs=nnx.Rngs(0))


def images_of(n, image_shape):
    return jax.random.normal(jax.random.key(1), (n, *image_shape)) + 0.3


@pytest.mark.parametrize(
    ("config", "size", "parameters", "features"),
    [
        # 9·3·64 + 3·9·64² kernels and 4·2·64 of the normalisation.
        (ModelConfig(), 84, 9 * 3 * 64 + 3 * 9 * 64**2 + 4 * 2 * 64, 25 * 64),
        (shared.RESNET12, 84, 12_424_320, 640),
        # The published counts, less those of a classifier of 1000 or 10 classes (2,049,000 of 50).
        (RESNET18, 224, 11_689_512 - 513_000, 512),
        (shared.RESNET50, 224, 23_508_032, 2048),
        (shared.RESNET32, 32, 464_154 - 650, 64),
        (  # Two shortcuts of 3×3 convolutions, each with its normalisation; a linear layer.
            replace(shared.RESNET32, shortcut="conv3x3", dim=50, projection="linear"),
            *(32, 464_154 - 650 + 9 * (16 * 32 + 32 * 64) + 2 * (32 + 64) + 64 * 50 + 50, 50),
        ),
        (WRN_28_10, 80, 36_479_194 - 6_410, 640),
        # WRN-16-4.
        (replace(WRN_28_10, widths=(64, 128, 256), blocks=(2, 2, 2)), 32, 2_748_890 - 2_570, 256),
        (shared.SWIN_T, 224, 28_288_354 - 769_000, 768),
    ],
    ids=lambda value: getattr(value, "backbone", None),
)
def test_parameter_counts_are_the_known_ones(config, size, parameters, features):
    model = nnx.eval_shape(lambda: build(config, (size, size, 3)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == parameters
    assert model.num_features == features


def test_drop_block_removes_squares_of_about_the_rate_and_keeps_the_sum():
    x = jnp.ones((64, 10, 12, 32))
    y = np.asarray(drop_block(x, jax.random.split(jax.random.key(0), 64), rate=0.1, block_size=5))
    assert 0.075 < (y == 0).mean() < 0.11  # Blocks overlap: a little less than the rate goes.
    np.testing.assert_allclose(y.sum((1, 2, 3)), x[0].size, rtol=4 * FLOAT32)
    areas = (y == 0).sum((1, 2))
    sample, channel = np.argwhere(areas == 25)[0]
    rows, columns = np.nonzero(y[sample, :, :, channel] == 0)
    assert np.ptp(rows) == np.ptp(columns) == 4
    # A block is no larger than the map; where nothing is left, no number is infinite.
    for rate, size in ((0.999, 1), (0.1, 20)):
        found = drop_block(x[:1], jax.random.key(0)[None], rate=rate, block_size=size)
        assert bool(jnp.isfinite(found).all())


@pytest.mark.parametrize(
    "drop", [partial(drop_block, rate=0.3, block_size=3), partial(dropout, rate=0.3)]
)
def test_what_is_dropped_follows_the_key_of_the_sample(drop):
    images, keys = images_of(6, (10, 10, 3)), jax.random.split(jax.random.key(2), 6)
    dropped = jax.jit(drop)(images, keys)
    order = np.array([3, 0, 5, 1, 4, 2])
    chex.assert_trees_all_equal(jax.jit(drop)(images[order], keys[order]), dropped[order])
    assert ((dropped[0] == 0) != (dropped[1] == 0)).any()


@pytest.mark.parametrize("whole", [False, True])
def test_dropout_keeps_the_sum_and_the_type(whole):
    """`whole` drops all of a sample: the branches of stochastic depth."""
    x = jnp.ones((2000, 4, 3, 2), jnp.bfloat16)
    y = dropout(x, jax.random.split(jax.random.key(0), 2000), rate=0.3, whole=whole)
    assert y.dtype == jnp.bfloat16
    y = np.asarray(y, np.float32).reshape(2000, -1)
    assert 0.26 < (y == 0).mean() < 0.34
    np.testing.assert_allclose(y[y != 0], 1 / 0.7, rtol=1e-2)
    assert ((y == 0).all(1) == (y == 0).any(1)).all() == whole


@partial(nnx.jit, static_argnames="train")
def apply(model, images, keys=None, *, train):
    return model(images, train=train, keys=keys)


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL["wrn28"], dropout=0.5),
        pytest.param(replace(SMALL["swin"], stochastic_depth=0.9), marks=pytest.mark.long),
    ],
    ids=lambda config: config.backbone,
)
def test_a_network_drops_in_training_only_and_needs_keys(config):
    model, keys = build(config), jax.random.split(jax.random.key(2), 6)
    images = images_of(6, (32, 32, 3))
    first = apply(model, images, keys, train=True)
    assert bool((apply(model, images, keys[::-1], train=True) != first).any())
    # Evaluation needs no keys: it drops nothing.
    nnx.eval_shape(lambda model: model(images, train=False), model)
    with pytest.raises(ValueError, match="needs keys, one per image"):
        model(images, train=True)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.0), (10, 0.1), (90, 0.2)])
def test_the_last_two_stages_have_drop_block_and_those_before_dropout(step, rate):
    config = ModelConfig(dropout=0.3, drop_block=0.2, drop_block_size=3, drop_block_steps=20)
    x, keys = jnp.ones((2, 12, 12, 8)), jax.random.split(jax.random.key(0), 2)
    own = jax.vmap(lambda key: jax.random.fold_in(key, 5))(keys)
    blocks = drop_block(x, own, rate=rate, block_size=3)
    for stages_after, expected in enumerate((blocks, blocks, *2 * [dropout(x, own, rate=0.3)])):
        how = {"number": 5, "stages_after": stages_after}
        found = drop_after_block(x, keys, jnp.array(step), config, **how)
        np.testing.assert_allclose(found, expected, rtol=4 * FLOAT32)
    assert drop_after_block(x, keys, None, ModelConfig(), number=5, stages_after=0) is x


@pytest.mark.parametrize("backbone", SMALL)
def test_bfloat16_is_the_type_of_the_products_alone(backbone):
    model = nnx.eval_shape(lambda: build(replace(SMALL[backbone], dtype="bfloat16")))
    graphdef, state = nnx.split(model)
    leaves = jax.tree.leaves(state)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)

    def run(state, images):
        return nnx.merge(graphdef, state, copy=True)(images, train=True)

    assert jax.eval_shape(run, state, images).dtype == jnp.float32
    lines = str(jax.make_jaxpr(run)(state, images)).splitlines()
    operation, number, wide = "conv_general_dilated", sum(x.ndim == 4 for x in leaves), 0
    if backbone == "swin":  # Six of each of five blocks, with wide logits; three between stages.
        operation, number, wide = "dot_general", 5 * 6 + 3, 5
    products = [line for line in lines if f"= {operation}[" in line]
    assert len(products) == number
    assert sum("bf16[" in line and "f32[" not in line for line in products) == number - wide


@pytest.mark.parametrize(
    ("config", "image_shape", "words"),
    [
        (ModelConfig(), (15, 32, 3), "at least 16×16 pixels, got 15×32×3"),
        (ModelConfig(widths=(64, 64, 64)), SIDE, "widths of conv4 needs 4 numbers"),
        (replace(RESNET18, blocks=(1, 1)), SIDE, "blocks of resnet18 needs 4 numbers"),
        (ModelConfig(blocks=(1, 1, 1, 1)), SIDE, r"conv4 does not support model\.blocks"),
        (ModelConfig(drop_block=0.1), SIDE, "conv4 does not support model.drop_block, got 0"),
        (replace(RESNET18, projection="norm", dim=3), SIDE, "norm needs model.dim = 0, got 3"),
        (replace(RESNET18, projection="linear"), SIDE, "projection = linear needs model.dim"),
        (replace(SMALL["swin"], widths=(32, 64, 70, 96)), SIDE, "swin must be multiples of 32"),
    ],
)
def test_what_an_architecture_does_not_have_is_refused(config, image_shape, words):
    with pytest.raises(ConfigError, match=words):
        build(config, image_shape)


SHAPES = [(3, 5, 7, 2, 4, 3), (3, 5, 7, 1, 4, 3), (6, 4, 4, 6, 5, 3), (4, 6, 5, 4, 3, 5)]
"""n, h, w, c, o, and the size of the kernel: few channels, one, and others in turns."""


def by_xla(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def inputs(shape):
    n, h, w, c, o, size = shape
    rng = np.random.default_rng(0)
    shapes = (n, h, w, c), (size, size, c, o), (n, h, w, o)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def values_and_gradients(function, x, kernel, weights):
    y, pull = jax.vjp(function, x, kernel)
    return y, pull(weights)


@pytest.mark.parametrize(
    ("shape", "rows"), [*((shape, 50) for shape in SHAPES), (SHAPES[2], 1), (SHAPES[3], 10_000)]
)
def test_values_and_gradients_are_those_of_xla(monkeypatch, shape, rows):
    monkeypatch.setattr(convolution, "_ROWS", rows)
    jax.clear_caches()
    arrays = inputs(shape)
    found = jax.jit(partial(values_and_gradients, convolve))(*arrays)
    expected = jax.jit(partial(values_and_gradients, by_xla))(*arrays)
    chex.assert_trees_all_close(found, expected, rtol=4 * FLOAT32, atol=4 * FLOAT32)
    chex.assert_trees_all_equal_dtypes(found, expected)


def test_over_devices_the_batch_is_one():
    arrays, spec = inputs((8, 4, 4, 6, 5, 3)), jax.P("batch")

    def loss(x, kernel, weights):
        return jnp.sum(jnp.sin(convolve(x, kernel)) * weights)

    @partial(
        jax.shard_map,
        mesh=jax.make_mesh((4,), ("batch",), (jax.sharding.AxisType.Auto,)),
        in_specs=(spec, jax.P(), spec),
        out_specs=jax.P(),
    )
    def summed(*arrays):
        return lax.psum(loss(*arrays), "batch")

    found, expected = (jax.jit(jax.grad(f, (0, 1)))(*arrays) for f in (summed, loss))
    chex.assert_trees_all_close(found, expected, rtol=16 * FLOAT32, atol=4 * FLOAT32)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_have_the_convolutions_of_xla(platform):
    def operations(function, platform):
        compiled = jax.jit(partial(values_and_gradients, function)).trace(*inputs(SHAPES[2]))
        text = compiled.lower(lowering_platforms=(platform,)).as_text()
        names = ("stablehlo.convolution", "stablehlo.dot_general", "stablehlo.while")
        return [text.count(name) for name in names]

    assert operations(convolve, platform) == operations(by_xla, platform) == [3, 0, 0]
    assert operations(convolve, "cpu") != [3, 0, 0]
