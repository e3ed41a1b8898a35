"""Two towers: which drawings are new, its losses, retrieval in both directions, and a run."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics.pairwise import cosine_similarity

from experiments.assembly import plan_run
from experiments.cli.main import main
from experiments.config import DataConfig
from experiments.contracts import Outputs, Problem
from experiments.data.pipeline import load_split
from experiments.datasets.icons import class_names
from experiments.errors import ConfigError
from experiments.models.characters import character_codes, embed_characters, init_characters
from experiments.protocols import two_towers
from experiments.protocols.two_towers import TwoTowersConfig, TwoTowersLoss
from tests.experiments.tiny_runs import TINY_OPTIONS
from tests.jaxloss import references
from tests.tolerances import FLOAT32


def test_the_drawings_of_the_base_classes_are_divided(folders):
    protocol = two_towers.build(TwoTowersConfig())
    base, held_out, new, novel = (
        protocol.load(folders, split) for split in ("base", "validation", "new-drawings", "novel")
    )
    stored = load_split("icons", "base", **vars(folders))
    assert sum(len(part.labels) for part in (base, held_out, new)) == len(stored.labels)
    np.testing.assert_array_equal(base.images[:9], stored.images[[0, 1, 2, 3, 5, 6, 7, 8, 10]])
    np.testing.assert_array_equal(held_out.images[1], stored.images[14])
    np.testing.assert_array_equal(new.images[0], stored.images[9])
    counts = protocol.counts_by_split(folders)
    for split, part in {"base": base, "validation": held_out, "novel": novel}.items():
        np.testing.assert_array_equal(counts[split], np.bincount(part.labels))
    assert np.bincount(new.labels).min() >= 2
    assert [*stored.class_names] == class_names("base")
    assert [*novel.class_names] == class_names("novel")
    with pytest.raises(ConfigError, match=r"data\.name must be icons, whose classes have names"):
        plan_run(TwoTowersConfig(data=DataConfig(name="kanji_radicals")))


def test_a_name_is_encoded_without_its_padding():
    params = init_characters(jax.random.key(0), width=5, dim=3)
    together, alone = (
        jax.jit(embed_characters)(params, jnp.asarray(character_codes(names)))
        for names in (["eye", "qr-code"], ["eye"])
    )
    np.testing.assert_allclose(together[0], alone[0], atol=FLOAT32)
    assert np.abs(together[0] - together[1]).max() > 1e-2


@pytest.mark.parametrize("name", ["info-nce", "sigmoid"])
def test_a_drawing_belongs_to_its_name_and_not_to_others(name):
    options = TwoTowersLoss(name, dim=6, characters=5, bias=-1.0)
    objective = two_towers.objective(options, Problem(7, np.ones(100, int)))
    head = objective.init_head(jax.random.key(1))
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(5, 7)).astype(np.float32), np.array([3, 60, 3, 8, 99])

    @jax.jit
    def run(head, x, y):
        def loss_of(head):
            loss = objective.loss(x, y, head, ())
            return loss.value, loss.means

        return *jax.value_and_grad(loss_of, has_aux=True)(head), objective.logits(x, head, ())

    (value, means), gradient, logits = run(head, features, labels)
    codes = jnp.asarray(character_codes(class_names("base")))
    images, names = features @ head["images"], jax.jit(embed_characters)(head["names"], codes)
    batch = np.asarray(images), np.asarray(names)[labels]
    # The drawings 0 and 2 have one name: their pairs do not count.
    if name == "info-nce":
        scale, bias = 1 / 0.07, 0
        expected = references.info_nce_loss(*batch, ids=labels, temperature=0.07)
    else:
        scale, bias = 10, -1
        expected = references.sigmoid_contrastive_loss(*batch, ids=labels, scale=10, bias=-1)
    assert float(value) == pytest.approx(expected, rel=16 * FLOAT32)
    assert float(means["scale"]) == pytest.approx(scale)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    expected = scale * cosine_similarity(images, names) + bias
    np.testing.assert_allclose(logits, expected, atol=16 * FLOAT32)


def test_retrieval_and_its_level_of_chance_are_those_of_a_count():
    rng = np.random.default_rng(3)
    labels = np.sort(rng.permutation(np.arange(120) % 50))
    head = two_towers.objective(TwoTowersLoss(dim=6), Problem(7, np.ones(100, int))).init_head(
        jax.random.key(2)
    )
    features = rng.normal(size=(120, 7)).astype(np.float32)
    outputs = Outputs(features, labels, lambda: features, np.ones(100, int), head=head)
    found = two_towers.retrieval(outputs, "novel")
    images = features @ np.asarray(head["images"])
    codes = jnp.asarray(character_codes(class_names("novel")))
    scores = cosine_similarity(images, np.asarray(embed_characters(head["names"], codes)))
    is_right = labels[:, None] == np.arange(50)
    expected = []
    for of, right in ((scores, is_right), (scores.T, is_right.T)):
        ranked = np.take_along_axis(right, np.argsort(-of, axis=1), axis=1)
        expected += [ranked[:, :k].any(1).mean() for k in (1, 5)]
    assert found == pytest.approx(expected)
    # New drawings of the base classes have numbers of their own, by the names of those classes.
    base = outputs._replace(features=features[::-1])
    results = two_towers.evaluate("novel", {"novel": outputs, "new-drawings": base}.__getitem__)
    of_base = two_towers.retrieval(base, "base")
    assert [metric["value"] for metric in results["metrics"]] == [*found, *of_base]
    assert two_towers.build(TwoTowersConfig()).validate(base) == of_base[0] != found[0]
    drawn = [rng.permutation(labels)[:5] for _ in range(2000)]
    hits = np.mean([[c in d[:1], c in d] for d in drawn for c in range(50)], axis=0)
    assert two_towers.chance(labels) == pytest.approx([1 / 50, 5 / 50, *hits], abs=0.01)


@pytest.mark.long
def test_a_run_from_the_command_line(tmp_path, folders, capsys):
    command = ["train", "icons-names", "--data-dir", str(folders.data_dir), "--steps", "2"]
    command += [*TINY_OPTIONS[-7:], "--directory", str(tmp_path / "run")]
    assert main(command) == 0
    assert "- Loss: InfoNCE\n- Data: icons\n" in capsys.readouterr().out
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    names = [metric["name"] for metric in report["metrics"]]
    assert names == [metric.name for metric in two_towers.build(TwoTowersConfig()).metrics]
