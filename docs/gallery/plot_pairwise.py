"""
Pairwise losses: what pulls and what pushes
===========================================

Six losses compare samples with one another, or with one learned proxy per class. They get the same
fifteen points of three classes. The first picture shows the step of each point down the gradient,
the second one the path of the points over 60 such steps.
"""

# sphinx_gallery_thumbnail_number = 2

from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxloss

# %%
# The features are points in a plane. One circle starts among the squares, and one triangle among
# the circles. NCA compares distances. All others compare cosines here: only the direction of a
# feature matters, and each step is at a right angle to the line to the origin.

degrees = np.array([15, 55, 75, 100, 165, 120, 145, 190, 210, 260, 240, 285, 310, 345, 40])
radii = np.array([1.2, 0.7, 1.1, 0.8, 0.75, 1.1, 0.8, 1.1, 0.7, 0.7, 1.15, 0.95, 0.65, 0.9, 1.05])
features = jnp.asarray(radii[:, None] * np.exp(1j * np.radians(degrees))[:, None].view(float))
labels = jnp.repeat(jnp.arange(3), 5)
proxies = jnp.array([[0.95, -0.75, 1.0], [0.3, -0.65, -0.1]])  # One column per class.

losses = {
    "NCA": partial(jaxloss.nca_loss, temperature=0.5),
    "Supervised contrastive": partial(jaxloss.supervised_contrastive_loss, temperature=0.5),
    "Triplet with hard mining": partial(jaxloss.triplet_loss, margin=0.3),
    "Multi-similarity": partial(jaxloss.multi_similarity_loss, negative_scale=10.0),
    "Circle": partial(jaxloss.circle_loss, scale=4.0),
    "Proxy Anchor": partial(jaxloss.proxy_anchor_loss, scale=4.0),
}

# %%
# The losses have different scales, so we choose each learning rate such that the longest first step
# has the same length. The proxies of Proxy Anchor are parameters and move, too.


def descend(name, num_steps=60, first_step=0.1):
    """Returns the points before each step, and the proxies."""

    def loss(points, proxies):
        more = (proxies,) if name == "Proxy Anchor" else ()
        return losses[name](points, labels, *more)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    points_step, proxies_step = gradient(features, proxies)
    lengths = jnp.linalg.norm(jnp.concatenate([points_step, proxies_step.T]), axis=1)
    rate = first_step / jnp.max(lengths)
    path = [(features, proxies)]
    for _ in range(num_steps):
        step = gradient(*path[-1])
        path.append(jax.tree.map(lambda x, g: x - rate * g, path[-1], step))
    return jax.tree.map(lambda *points: np.stack(points), *path)


paths = {name: descend(name) for name in losses}


def make_panels():
    """Returns a figure, and for each loss its axes, its points, and its proxies or None."""
    figure, axes = plt.subplots(2, 3, figsize=(7.5, 5))
    for axis, name in zip(axes.flat, losses, strict=True):
        axis.set_title(name)
        axis.add_patch(plt.Circle((0, 0), 1, fill=False, color="0.88", linewidth=1))
        axis.plot(0, 0, "+", color="0.6", markersize=6)
        axis.set(aspect="equal", xlim=(-1.5, 1.5), ylim=(-1.5, 1.3), xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    stars = [path[1] if name == "Proxy Anchor" else None for name, path in paths.items()]
    return figure, zip(axes.flat, (path[0] for path in paths.values()), stars, strict=True)


# %%
# Before: the arrows are the first steps, five times as long. A point far from its class moves most.
# The triplet loss looks at one positive and one negative of each anchor; the other losses weigh all
# of them.

figure, panels = make_panels()
for axis, points, stars in panels:
    steps = points[1] - points[0]
    for label, marker in enumerate("os^"):
        own, style = np.asarray(labels) == label, {"color": f"C{label}"}
        quiver = {"angles": "xy", "scale_units": "xy", "scale": 0.2, "width": 0.014}
        quiver |= {"headwidth": 3.4, "headlength": 3.6, "headaxislength": 3.2}
        axis.quiver(*points[0, own].T, *steps[own].T, **quiver, **style)
        axis.plot(*points[0, own].T, marker, markerfacecolor="white", markersize=5.5, **style)
        if stars is not None:
            axis.plot(*stars[0, :, label], marker="*", markersize=11, **style)
figure.suptitle("Before: the same points, and the step that each loss takes")
plt.show()

# %%
# After: filled markers are the points after 60 steps, and lines are their paths. Stars are proxies.

figure, panels = make_panels()
for axis, points, stars in panels:
    for label, marker in enumerate("os^"):
        own, style = np.asarray(labels) == label, {"color": f"C{label}"}
        for path in points[:, own].transpose(1, 0, 2):
            axis.plot(*path.T, linewidth=1, alpha=0.6, **style)
        axis.plot(*points[-1, own].T, marker, markersize=5.5, **style)
        if stars is not None:
            axis.plot(*stars[-1, :, label], marker="*", markersize=11, **style)
figure.suptitle("After 60 steps: where the same points went")
plt.show()
