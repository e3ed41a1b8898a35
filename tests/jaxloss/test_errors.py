"""Wrong arguments of the functions that are no losses, and of options of single losses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss.harness import enable_x64, raises
from tests.tolerances import FLOAT64


def ones(shape: Any, dtype: Any = np.float32) -> jax.Array:
    """`jnp.ones` compiles a program for each shape, here whenever the file is imported."""
    return jax.device_put(np.ones(shape, dtype))


def zeros(shape: Any, dtype: Any = np.float32) -> jax.Array:
    return jax.device_put(np.zeros(shape, np.int32 if dtype is int else dtype))


LABELS = zeros(5, int)
FEATURES, WEIGHTS, MEANS = ones((5, 4)), ones((4, 3)), ones((3, 4))
BASIS = jaxloss.spectral_basis(WEIGHTS)
NAN = float("nan")
Wrong = list[tuple[type[Exception], str, dict[str, Any]]]


def values(error: type[Exception], name: str, *values: Any, match: str = "") -> Wrong:
    """Wrong values of one argument, which the message names, and further errors before theirs."""
    wrong: Wrong = []
    for value in values:
        if isinstance(value, type):
            error = value
        else:
            wrong.append((error, match or name, {name: value}))
    return wrong


def basis_of(shape: Any) -> Any:
    return jaxloss.spectral_basis(ones(shape))


OF_ROWS, COLUMN = {"features": FEATURES, "labels": LABELS}, zeros((5, 1), int)
FIRST_COLUMN = r"a column are labels\[:, 0\]"
WRONG_LABELS = values(ValueError, "labels", LABELS[:4], COLUMN, TypeError, zeros(5))
WRONG_MASKS = values(ValueError, "where", ones(4, bool), TypeError, ones(5))
WRONG_MATRIX = values(ValueError, "weights", ones(4), TypeError, ones((4, 3), int))
OF_LOGITS = {"features": FEATURES, "weights": WEIGHTS}
WRONG_LOGITS: Wrong = [
    *values(ValueError, "features", ones(4), TypeError, zeros((5, 4), int)),
    *values(TypeError, "weights", zeros((4, 3), int)),
    *values(ValueError, "weights", *map(ones, [(4,), (5, 3), (1, 3), (1, 4, 3)])),
]
BELOW_0 = values(ValueError, "epsilon", -1e-3)
OF_PROTOTYPES = {"features": ones((5, 3)), "labels": LABELS, "prototypes": MEANS}
WRONG_PROTOTYPES: Wrong = [
    *values(
        *(ValueError, "prototypes", MEANS.T, MEANS[0], MEANS[:, :0], MEANS[None]),
        *(TypeError, zeros((3, 4), int)),
        match=r"`prototypes` must",
    ),
    *values(ValueError, "assignment", zeros(0, int), zeros((4, 1), int)),
    *values(TypeError, "assignment", zeros(4), [0, 1, 2, 3]),
]
WRONG_GROUPS: Wrong = [
    (ValueError, r"`num_groups` must be at most .* 4, got 5", {"num_groups": 5}),
    (ValueError, "`num_groups` must be at least 1, got 0", {"num_groups": 0}),
    *values(TypeError, "num_groups", 2.0, True, None, match="`num_groups` must be a Python integ"),
]
OF_SAMPLES = {"features": FEATURES, "labels": LABELS, "weights": WEIGHTS}

OF_REFERENCES = {"references": ones((6, 4)), "reference_labels": zeros(6, int)}
NO_REFERENCES = dict.fromkeys(OF_REFERENCES)
WRONG_REFERENCES: Wrong = [
    (ValueError, "`references`.* only `reference_labels`", {"references": None}),
    (ValueError, "only `reference_where`", NO_REFERENCES | {"reference_where": ones(6, bool)}),
    *values(ValueError, "references", ones((6, 1)), match=r"`references`.*d = 4.*\(6, 1\)"),
    *values(ValueError, "references", ones(4), match=r"`references`.*\[m, d\]"),
    *values(ValueError, "reference_labels", None, match="`reference_labels`.* only `references`"),
    *values(ValueError, "reference_labels", LABELS, match=r"`reference_labels`.*\(6, 4\)"),
    *values(ValueError, "reference_labels", zeros((1, 6), int), match=r"`reference_labels`.*\[m\]"),
    *values(ValueError, "reference_where", ones(5, bool), match=r"`reference_where`.*\(5,\)"),
    *values(TypeError, "references", zeros((6, 4), int), [[1.0] * 4], match="`references`.*, got"),
    *values(TypeError, "reference_labels", ones(6), match="`reference_labels`.*float32"),
    *values(TypeError, "reference_where", ones(6), match="`reference_where`.*float32"),
]


def name_of(value: Any) -> str:
    return getattr(getattr(value, "func", value), "__name__", "") if callable(value) else ""


def case(function: Callable[..., Any], right: dict[str, Any], *wrong: Wrong) -> Any:
    """A function, arguments that are right, and (error, pattern, changes) that are not."""
    return function, right, [one for some in wrong for one in some]


CASES: list[tuple[Callable[..., Any], dict[str, Any], Wrong]] = [
    case(jaxloss.cosine_logits, OF_LOGITS, WRONG_LOGITS),
    case(
        jaxloss.linear_logits,
        OF_LOGITS | {"bias": ones(3)},
        WRONG_LOGITS,
        values(ValueError, "bias", *map(ones, [(), (1,), (5,), (1, 4)]), TypeError, zeros(3, int)),
    ),
    case(jaxloss.project_classifier, OF_LOGITS, WRONG_LOGITS, BELOW_0),
    case(jaxloss.project_complement, OF_LOGITS, WRONG_LOGITS, BELOW_0),
    case(
        jaxloss.project_spectral_complement,
        OF_LOGITS | {"basis": BASIS},
        WRONG_LOGITS,
        values(ValueError, "power", -0.1),
        values(ValueError, "basis", *map(basis_of, [(3, 4), (4, 2), (5, 3)]), match=r"\(4, 3\)"),
        values(TypeError, "basis", tuple(BASIS), match="basis.*spectral_basis.*tuple"),
        values(TypeError, "basis", BASIS._replace(values=ones(3, int)), match=r"basis\.values"),
    ),
    case(jaxloss.spectral_basis, {"weights": WEIGHTS}, WRONG_MATRIX),
    case(
        jaxloss.spectral_overlap,
        {"weights": WEIGHTS, "power": 0.3},
        values(ValueError, "power", -0.1),
        WRONG_MATRIX,
        values(ValueError, "basis", BASIS._replace(vectors=ones(4)), match=r"basis\.vectors"),
    ),
    case(
        jaxloss.nca_loss,
        OF_ROWS,
        values(ValueError, "labels", zeros((5, 3)), zeros((5, 3), int), match="labels.argmax"),
        values(ValueError, "labels", COLUMN, match=FIRST_COLUMN),
        values(TypeError, "labels", [0] * 5, match="convert it with np.asarray"),
        values(TypeError, "labels", list(LABELS), match="convert it with jnp.asarray"),
        values(TypeError, "labels", None, match="got NoneType$"),
        values(TypeError, "temperature", [[1], [2, 3]], jaxloss.make_queue(2, 4)),
        values(ValueError, "temperature", 10**400),
    ),
    case(jaxloss.nca_loss, OF_ROWS | OF_REFERENCES, WRONG_REFERENCES),
    case(
        jaxloss.supervised_contrastive_loss,
        {"features": FEATURES, "labels": ones((5, 2), int)}
        | {"references": ones((6, 4)), "reference_labels": ones((6, 2), int)},
        values(ValueError, "labels", COLUMN, match=FIRST_COLUMN),
        values(TypeError, "labels", ones((5, 2), np.complex64), match="`labels` must be bool"),
        values(ValueError, "labels", LABELS, match=r"`reference_labels` must have shape \[m\]"),
        values(ValueError, "reference_labels", ones((6, 1), int), match="with C = 2 to match"),
        values(ValueError, "reference_labels", ones(6, int), match=r"must have shape \[m, C\]"),
    ),
    case(
        jaxloss.discriminability,
        OF_ROWS,
        values(ValueError, "features", zeros(3), TypeError, zeros((5, 4), int)),
        WRONG_LABELS,
        WRONG_MASKS,
    ),
    case(
        jaxloss.retrieval_metrics,
        OF_ROWS,
        values(ValueError, "ks", (), 3, np.int64(3), None, (0,), TypeError, "12", (1.5,)),
        values(ValueError, "distance", "l1"),
        values(ValueError, "block_size", 0),
        values(ValueError, "references", FEATURES),
        WRONG_MASKS,
    ),
    case(
        jaxloss.two_way_loss,
        {"logits": zeros((5, 4)), "targets": zeros((5, 4), int)},
        values(ValueError, "reduction", "none", match="reduction.*class_wise.*sample_wise_loss"),
    ),
    case(jaxloss.prototype_loss, OF_PROTOTYPES, WRONG_PROTOTYPES),
    case(
        jaxloss.dot_regression_loss,
        OF_PROTOTYPES | {"lengths": ones(4)},
        values(ValueError, "lengths", ones(3), match=r"`lengths`.*C = 4.*\(3,\)"),
        values(ValueError, "assignment", zeros(2, int), match=r"`lengths`.*C = 2.*\(4,\)"),
        values(ValueError, "lengths", ones((4, 1)), match="`lengths`"),
        values(TypeError, "lengths", ones(4, int), match="`lengths`"),
    ),
    case(
        jaxloss.update_class_means,
        {"class_means": MEANS, "features": ones((5, 3)), "labels": LABELS},
        values(ValueError, "class_means", MEANS.T, match=r"class_means.*d = 3.*\(4, 3\)"),
        values(ValueError, "class_means", MEANS[0], MEANS[:, :0], TypeError, ones((3, 4), int)),
        values(TypeError, "features", ones((5, 3), int)),
        values(ValueError, "decay", -0.1, 1.0, NAN),
        WRONG_LABELS,
        WRONG_MASKS,
    ),
    case(
        jaxloss.class_balanced_lengths,
        {"labels": LABELS, "num_classes": 3},
        values(TypeError, "labels", zeros(5)),
        values(ValueError, "labels", COLUMN),
        values(ValueError, "num_classes", 0),
        WRONG_MASKS,
    ),
    case(
        jaxloss.simplex_prototypes,
        {"num_prototypes": 5, "dim": 4},
        values(ValueError, "num_prototypes", 7, match="num_prot.*5.*7.*uniform_prototypes"),
        values(ValueError, "num_prototypes", 0, -1),
        [(ValueError, "dim", {"num_prototypes": 1, "dim": dim}) for dim in (0, -1)],
        values(TypeError, "num_prototypes", 2.0),
        values(TypeError, "dim", True),
    ),
    case(
        partial(jaxloss.uniform_prototypes, jax.random.key(0)),
        {"num_prototypes": 3, "dim": 3, "num_steps": 2},
        *(values(ValueError, name, 0) for name in ("num_prototypes", "dim", "num_steps")),
        values(TypeError, "num_prototypes", 3.0),
        values(ValueError, "temperature", 0.0, -1.0, NAN, match="`temperature`"),
        values(ValueError, "final_temperature", 0.0, -1.0, NAN),
    ),
    case(
        jaxloss.prototype_separation,
        {"prototypes": MEANS},
        values(ValueError, "prototypes", ones((4, 1)), match=r"prototypes.*two.*\(4, 1\)"),
        values(ValueError, "prototypes", ones(4), match=r"prototypes.*\(4,\)"),
        values(TypeError, "prototypes", ones((4, 2), int)),
    ),
    case(
        jaxloss.assign_prototypes,
        {"class_means": ones((4, 2)), "prototypes": WEIGHTS},
        values(ValueError, "class_means", ones((4, 5)), match=r"means.*3.*\(4, 3\).*\(4, 5\)"),
        values(ValueError, "class_means", ones((4, 0)), ones(4)),
        values(ValueError, "class_means", ones((5, 3)), match=r"prototypes.*d = 5.*\(4, 3\)"),
        values(TypeError, "class_means", ones((4, 2), int)),
        values(TypeError, "prototypes", ones((4, 3), int)),
    ),
    case(
        jaxloss.group_softmax_loss,
        OF_SAMPLES | {"num_groups": 4, "groups": zeros((5, 4), int)},
        WRONG_GROUPS,
        values(
            *(ValueError, "groups"),
            *(zeros(shape, int) for shape in [(), (4,), (1, 4), (4, 5), (5, 3)]),
            match=r"`groups`.*\(5, 4\).*broadcast_to",
        ),
        values(TypeError, "groups", zeros((5, 4)), zeros((5, 4), bool), match="integer dtype"),
    ),
    case(
        jaxloss.discriminative_groups,
        OF_SAMPLES | {"num_groups": 4},
        WRONG_GROUPS,
        values(ValueError, "weights", MEANS, match=r"must have shape \[d, C\] with d = 4"),
    ),
    *(
        case(
            make,
            {"num_samples": 5, "dim": 4, "num_groups": 4},
            WRONG_GROUPS,
            values(ValueError, "num_samples", 0),
            [(ValueError, "`dim`", {"dim": 0, "num_groups": 1})],
        )
        for make in (jaxloss.contiguous_groups, partial(jaxloss.random_groups, jax.random.key(0)))
    ),
    case(
        jaxloss.softmax_loss,
        {"logits": ones((5, 4)), "labels": ones((5, 4))},
        values(ValueError, "labels", ones((5, 3)), ones((4, 4)), TypeError, ones(5)),
        values(ValueError, "labels", zeros((5, 4), int), match="labels.argmax.*are floats"),
        values(
            ValueError, "logits", ones((2, 5, 4)), match=r"axes \(2, 5\) of `logits` \(2, 5, 4\)"
        ),
    ),
    case(
        jaxloss.classifier_loss,
        OF_SAMPLES | {"labels": ones((5, 3)), "similarity": "cosine"},
        values(ValueError, "labels", ones((5, 4)), match=r"with C = 3 to match `weights` \(4, 3\)"),
        values(ValueError, "labels", ones((4, 3)), ones((5, 3), int)),
        values(
            ValueError,
            "margin",
            0.1,
            ones(3),
            match="`labels` must be class indices, got .* for `margin`",
        ),
        values(
            ValueError, "sample_angular_margin", ones(5), match="`labels` must be class indices"
        ),
        [(ValueError, "soft_cap", {"labels": LABELS, "angular_margin": 0.1, "soft_cap": 2.0})],
        values(ValueError, "class_axis_name", "classes", match="pass all weights to each device"),
    ),
    case(
        jaxloss.classifier_loss,
        OF_SAMPLES,
        [(ValueError, "did you swap `labels`", {"labels": WEIGHTS, "weights": LABELS})],
    ),
    case(
        partial(jaxloss.classifier_loss, class_axis_name="classes"),
        OF_SAMPLES,
        values(ValueError, "axis_name", "classes", ("batch", "classes"), match="class_axis_name"),
    ),
]


@pytest.mark.parametrize(("function", "right", "wrong"), CASES, ids=name_of)
def test_wrong_arguments_are_named(function, right, wrong):
    if "class_axis_name" not in getattr(function, "keywords", {}):  # It needs devices.
        jax.eval_shape(lambda: function(**right))
    for error, match, changes in wrong:
        with raises(error, match=match):
            function(**(right | changes))


# Arrays that JAX does not have ----

QUEUE: Any = jaxloss.make_queue(6, 4)
# The tests compile functions that are looked up later.
nca_loss: Any = jaxloss.nca_loss
info_nce_loss: Any = jaxloss.info_nce_loss
classifier_loss: Any = jaxloss.classifier_loss
of_rows = partial(nca_loss, FEATURES)
of_nca = partial(of_rows, LABELS)
ODD: dict[str, tuple[Callable[[np.ndarray], Any], type[Exception], str]] = {
    "strings": (lambda a: a.astype(str), TypeError, ", got <U"),
    "bytes": (lambda a: a.astype("S8"), TypeError, ", got .S8"),
    "objects": (lambda a: a.astype(object), TypeError, ", got object"),
    "datetimes": (lambda a: a.astype("datetime64[s]"), TypeError, r", got datetime64\[s\]"),
    "long doubles": (lambda a: a.astype(np.longdouble), TypeError, r"\.astype\(np.float64\)"),
    "big-endian": (
        lambda a: a.astype(a.dtype.newbyteorder(">")),
        TypeError,
        r'\.astype\(.*\.dtype\.newbyteorder\("="\)\)',
    ),
    "masked": (lambda a: np.ma.array(a), TypeError, "got a masked one; "),
    "structures": (lambda a: np.zeros(a.shape, [("a", "i4")]), TypeError, "`a`|got .*'a'"),
    "too large": (
        lambda a: a.astype(np.int64) + 2**40,
        OverflowError,
        'fit into int32, got 1099.*jax.config.update."jax_enable_x64", True',
    ),
}
OF_KINDS = {"too large": "i", "long doubles": "f", "big-endian": "if"}
OF_TOWERS = {"queries": FEATURES, "keys": ones((7, 4)), "ids": LABELS, "key_where": ones(7, bool)}
TARGETS = zeros((5, 4), int)
OF_NCA = {**OF_ROWS, "where": ones(5, bool), "sample_weights": ones(5)} | (
    OF_REFERENCES | {"reference_where": ones(6, bool)}
)
ALL_ARRAYS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (jaxloss.nca_loss, OF_NCA),
    (jaxloss.info_nce_loss, OF_TOWERS),
    (jaxloss.warp_loss, {"logits": FEATURES, "targets": TARGETS}),
    (
        partial(jaxloss.supervised_contrastive_loss, FEATURES),
        {"labels": TARGETS, "references": ones((6, 4)), "reference_labels": zeros((6, 4), int)},
    ),
    (jaxloss.classifier_loss, OF_SAMPLES | {"bias": ones(3), "margin": ones(3)}),
    (partial(jaxloss.margin_softmax_loss, FEATURES, LABELS), {"sample_angular_margin": ones(5)}),
    (partial(jaxloss.group_softmax_loss, num_groups=2), OF_SAMPLES | {"groups": TARGETS}),
    (jaxloss.dot_regression_loss, OF_PROTOTYPES | {"assignment": LABELS, "lengths": ones(5)}),
    (partial(jaxloss.update_class_means, ones((4, 4))), OF_ROWS),
    (partial(jaxloss.class_balanced_lengths, num_classes=3), {"labels": LABELS}),
    (jaxloss.retrieval_metrics, OF_ROWS | OF_REFERENCES),
    (partial(jaxloss.push, QUEUE), OF_ROWS),
    (jaxloss.proxy_nca_loss, OF_ROWS | {"proxies": WEIGHTS}),
    (jaxloss.assign_prototypes, {"class_means": MEANS, "prototypes": MEANS}),
    (jaxloss.vicreg_loss, {"first": FEATURES, "second": FEATURES}),
]


@pytest.mark.parametrize(("function", "right"), ALL_ARRAYS, ids=name_of)
def test_arrays_that_jax_does_not_have_are_named(function, right):
    """Without running anything: the arrays are looked at when the function is traced."""
    kinds = ODD if function is jaxloss.nca_loss else {k: ODD[k] for k in ("strings", "too large")}
    for name, array in right.items():
        for kind, (change, error, match) in kinds.items():
            array = np.asarray(array)
            if array.dtype.kind in OF_KINDS.get(kind, array.dtype.kind):
                with raises(error, match=f"`{name}` must .*{match}"):
                    jax.eval_shape(partial(function, **right | {name: change(array)}))


def test_integers_of_64_bits_are_taken_if_they_fit():
    def call(labels):
        return jax.eval_shape(lambda: nca_loss(FEATURES, labels))

    right = np.array([-(2**31), -1, 0, 5, 2**31 - 1])
    wrong = [right + 1, right - 1, np.array([0, 1, 2, 3, 2**32], np.uint64), right << 32]
    for labels in (right, np.abs(right).astype(np.uint64), right.astype(np.int32)):
        call(labels)
    for labels in wrong:
        with raises(OverflowError, "`labels` must have integers that fit into u?int32"):
            call(labels)
    with enable_x64(True):
        for labels in wrong:
            call(labels.copy())  # JAX keeps what it made of the same array without x64.
        wide = jnp.asarray(right << 32)
    with raises(OverflowError, "`labels` must have integers that fit into int32"):
        call(wide)


@pytest.mark.slow
def test_large_labels_with_x64():
    """As many values as there are classes, and not their lower 32 bits."""
    rows, labels = np.random.default_rng(0).normal(size=(8, 3)), np.arange(8) % 4
    for loss in (nca_loss, jaxloss.prototypical_loss, lambda x, y: info_nce_loss(x, -x, ids=y)):
        with enable_x64(True):
            got, expected = (jax.jit(loss)(rows, of) for of in (labels * 2**32, labels))
        np.testing.assert_allclose(got, expected, rtol=FLOAT64)


# What the messages advise ----

WIDE: Any = np.arange(5) << 32
NUMBER_THEM = r"np.unique\(..., return_inverse=True\)\[1\]"
UNSIGNED = OF_TOWERS | {"ids": LABELS.astype(np.uint8)}
WEIGHTS_OF_SAMPLES = (
    r"^`sample_weights` must have shape \[n\] with n = 5 to match the samples, got \(7,\)$"
)


def traced(function: Any, *arrays: Any, **option: Any) -> Any:
    (name,) = option
    static = f'`{name}` must be .*got a traced array; .* jax.jit\\(..., static_argnames="{name}"'
    return partial(jax.jit(function), FEATURES, *arrays, **option), TypeError, static


def masked(function: Any, right: dict[str, Any], name: str, advice: str) -> Any:
    wrong = {name: np.ma.array(np.asarray(right[name]))}
    return partial(function, **right | wrong), TypeError, f"got a masked one; .*{advice}"


ADVICE: list[tuple[Callable[[], Any], type[Exception], str]] = [
    masked(nca_loss, OF_NCA, "features", r"features.filled\(0\), and .* with where=False"),
    masked(nca_loss, OF_NCA, "labels", r"labels.filled\(-1\)"),
    masked(nca_loss, OF_NCA, "where", r"where.filled\(False\)"),
    masked(nca_loss, OF_NCA, "references", r"references.filled\(0\), .* reference_where=False"),
    masked(info_nce_loss, UNSIGNED, "ids", r"ids.astype\(np.int32\).filled\(-1\)"),
    masked(info_nce_loss, UNSIGNED, "keys", "with key_where=False"),
    # Large integers are not the fault of weights or masks.
    (partial(of_nca, sample_weights=WIDE), TypeError, "must have a float dtype, got int64"),
    (partial(of_nca, where=WIDE), TypeError, "`where` must have dtype bool, got int64"),
    # The advice must not turn an index, or a label that is ignored, into another class.
    (partial(of_rows, WIDE), OverflowError, f"`labels` .*; .*{NUMBER_THEM}"),
    (partial(of_rows, np.array(list("abcde"))), TypeError, f"`labels` .*; .*{NUMBER_THEM}"),
    (
        partial(of_rows, WIDE - 1),
        OverflowError,
        f"{NUMBER_THEM}, but keep negative ones, or enable",
    ),
    (
        partial(jaxloss.prototype_loss, ones((5, 3)), LABELS, MEANS, assignment=WIDE),
        *(OverflowError, "`assignment` .* got 0 to 17179869184; enable 64 bits"),
    ),
    traced(jaxloss.retrieval_metrics, LABELS, ks=(1, 2)),
    traced(jaxloss.retrieval_metrics, LABELS, ks=1),
    traced(jaxloss.nca_loss, LABELS, block_size=2),
    traced(jaxloss.prototypical_loss, LABELS, num_classes=2),
    traced(jaxloss.info_nce_loss, FEATURES, symmetric=False),
    traced(jaxloss.triplet_loss, LABELS, soft=True),
    traced(jaxloss.proxy_nca_loss, LABELS, WEIGHTS, include_own=True),
    traced(jaxloss.direct_sum_loss, LABELS, WEIGHTS, stop_gradient=True),
    # A queue is no array.
    (
        *(partial(of_nca, references=QUEUE, reference_labels=QUEUE.labels), ValueError),
        "`reference_labels` must be None where `references` is a Queue",
    ),
    (
        partial(jaxloss.pairs.compare, FEATURES, ones((5, 4), int), references=QUEUE),
        *(ValueError, r"`references` is a Queue, .* are targets \(\d, \d\); pass arr"),
    ),
    (
        *(partial(of_nca, references=QUEUE.features, reference_labels=QUEUE), TypeError),
        "`reference_labels` .* got Queue; a Queue goes into references=",
    ),
    (partial(jaxloss.sigmoid_loss, FEATURES, QUEUE), TypeError, "`labels` .* array, got Queue"),
    (partial(info_nce_loss, FEATURES, QUEUE), TypeError, "`keys` .* Queue; .* key_where=jnp.conc"),
    # Nothing that the loss lacks is named.
    *(
        (partial(loss, *rows, sample_weights=ones(7)), ValueError, WEIGHTS_OF_SAMPLES)
        for loss, *rows in (
            (nca_loss, FEATURES, LABELS),
            (jaxloss.koleo_loss, FEATURES),
            (jaxloss.info_nce_loss, FEATURES, FEATURES),
            (jaxloss.class_wise_loss, FEATURES, TARGETS),
        )
    ),
]


def test_advice():
    for call, error, match in ADVICE:
        with raises(error, match):
            call()
    # A tracer is no `nnx.Param`.
    with raises(TypeError, match="`temperature` must be a scalar.*, got") as caught:
        jax.eval_shape(lambda t: of_nca(temperature=t), jnp.ones(3))
    assert "nnx.Param" not in str(caught.value)


@pytest.mark.slow
def test_tensors_and_parameters_of_other_libraries():
    torch, nnx = pytest.importorskip("torch"), pytest.importorskip("flax.nnx")
    half, weights = torch.ones((5, 4), dtype=torch.bfloat16), nnx.Param(WEIGHTS)
    call = partial(classifier_loss, labels=LABELS, weights=WEIGHTS)
    for features, options, match in (
        (
            torch.ones((5, 4), requires_grad=True),
            *({}, r"`features` .* got Tensor; .*features.detach\(\).cpu\(\).numpy\(\)"),
        ),
        (half, {}, r"features.detach\(\).float\(\).cpu\(\).numpy\(\)"),
        (FEATURES, {"weights": weights}, r"`weights` .* got Param; .* as weights\[...\]"),
        (
            FEATURES,
            {"margin": nnx.Param(ones(3)), "similarity": "cosine"},
            r"`margin` (.|\n)* as margin\[...\]",
        ),
    ):
        with raises(TypeError, match):
            call(features, **options)
    assert half.detach().float().cpu().numpy().dtype == np.float32
    jax.eval_shape(lambda: call(FEATURES, weights=weights[...]))
