"""
Margin softmax: where the boundaries are
========================================

A cosine classifier compares a feature with one direction per class. A margin lowers the logit of
the label before the softmax: the loss is then small for features of a smaller part of the circle,
or of a larger one if the margin is negative.
"""

from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxloss

# %%
# Three classes have their directions on the unit circle. For each feature on the circle and each
# class, we ask: if this class were the label, would it have more than half of the probability? It
# has if the loss is below log 2. Sub-centres give a class several directions, and the nearest one
# counts.

degrees = np.linspace(0, 360, 721)
features = np.stack([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], 1)


def columns(*angles):
    """Returns unit vectors at angles in degrees, along the first axis."""
    return jnp.asarray(np.stack([np.cos(np.radians(angles)), np.sin(np.radians(angles))]))


classifier = columns(90, 210, 330)
sub_centres = columns([55, 125], [195, 225], [315, 345])  # [2, 3 classes, 2 sub-centres]
panels = {
    "No margin": (classifier, {}),
    "Additive, m = 0.3": (classifier, {"margin": 0.3}),
    "Angular, a = 0.5": (classifier, {"angular_margin": 0.5}),
    "Negative, m = −0.3": (classifier, {"margin": -0.3}),
    "Per class, 0.6, 0 and 0": (classifier, {"margin": jnp.array([0.6, 0.0, 0.0])}),
    "Sub-centres, no margin": (sub_centres, {}),
}


def label_losses(weights, scale=30.0, **options):
    """Returns the loss of each feature with each class as its label, [classes, features]."""
    loss = partial(jaxloss.margin_softmax_loss, scale=scale, reduction="none", **options)
    logits = jaxloss.cosine_logits(jnp.asarray(features), weights)
    labels = jnp.tile(jnp.arange(3)[:, None], len(features))
    return np.asarray(jax.vmap(partial(loss, logits))(labels))


# %%
# Each class has a ring of its own. Without a margin the rings meet at the decision boundaries. With
# a positive margin they leave gaps, where no label has more than half of the probability: such
# features keep moving towards their class. With a negative margin they overlap.

figure, axes = plt.subplots(2, 3, figsize=(7.5, 5.2), subplot_kw={"projection": "polar"})
for axis, (title, (weights, options)) in zip(axes.flat, panels.items(), strict=True):
    axis.plot(np.radians(degrees), np.ones(len(degrees)), color="0.6", linewidth=1)
    for label, content in enumerate(label_losses(weights, **options) < np.log(2)):
        inner, outer = 1.06 + 0.15 * label, 1.17 + 0.15 * label
        ring = {"color": f"C{label}", "linewidth": 0.4}
        axis.fill_between(np.radians(degrees), inner, outer, where=content, **ring)
        for x, y in np.asarray(weights)[:, label].reshape(2, -1).T:
            arrow = {"arrowstyle": "-|>", "color": f"C{label}", "linewidth": 1.6, "shrinkA": 0}
            axis.annotate("", (np.arctan2(y, x), 1), (0, 0), arrowprops=arrow)
    axis.set_title(title)
    axis.set(rmax=1.5, xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
figure.suptitle("Rings show where each class has more than half of the probability as a label")
plt.show()

# %%
# The loss of the first class against the angle between the feature and its direction. Without a
# margin, the boundary to the next class is at 60 degrees. An angular margin a moves it by a / 2,
# whatever the angle between the classes is. A margin m moves it farther where classes are close.

figure, axis = plt.subplots(figsize=(6.5, 3))
from_own = (degrees >= 90) & (degrees <= 180)
for (title, (weights, options)), style in zip(
    list(panels.items())[:4], ("-", "--", ":", "-."), strict=True
):
    loss = label_losses(weights, scale=10.0, **options)[0]
    axis.plot(degrees[from_own] - 90, loss[from_own], style, label=title)
axis.axhline(np.log(2), color="0.75", linewidth=1, zorder=0)
axis.text(1, np.log(2) + 0.15, "log 2", fontsize=8, color="0.4")
axis.set(xlabel="angle to the direction of the label, degrees", ylabel="loss, scale 10")
axis.set(xlim=(0, 90), ylim=(0, 8), xticks=range(0, 91, 15))
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
figure.suptitle("The loss against the angle for four margins")
plt.show()
