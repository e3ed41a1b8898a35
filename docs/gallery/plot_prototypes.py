"""
Prototypes: fixed points that classes choose
============================================

Prototypes are points spread over a sphere before the training. A loss pulls the features of a class
towards its prototype. Which class gets which prototype need not be fixed: the assignment follows
the class means, and settles.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxloss

# %%
# ``uniform_prototypes`` starts from random directions and moves them apart. Here are twelve points,
# after the first step and after the last one. The best possible arrangement of twelve is an
# icosahedron, in which the largest cosine is 0.447.

key = jax.random.key(5)
stages = {"Random start": 1, "After 600 steps": 600}
elevation, azimuth = 0.35, -0.9  # Of the viewer.
viewer = np.array(
    [np.cos(elevation) * np.cos(azimuth), np.cos(elevation) * np.sin(azimuth), np.sin(elevation)]
)
longitude, latitude = np.mgrid[0 : 2 * np.pi : 50j, -np.pi / 2 : np.pi / 2 : 25j]
sphere = np.stack(
    [np.cos(longitude) * np.cos(latitude), np.sin(longitude) * np.cos(latitude), np.sin(latitude)]
)

figure, axes = plt.subplots(
    1, 2, figsize=(7.5, 4), subplot_kw={"projection": "3d", "computed_zorder": False}
)
for axis, (title, num_steps) in zip(axes, stages.items(), strict=True):
    prototypes = np.asarray(jaxloss.uniform_prototypes(key, 12, 3, num_steps=num_steps))
    largest, _ = jaxloss.prototype_separation(jnp.asarray(prototypes))
    in_front = viewer @ prototypes > 0
    axis.plot_surface(*sphere, color="0.92", alpha=0.75, linewidth=0, shade=False, zorder=1)
    for i, j in np.argwhere(np.triu(prototypes.T @ prototypes > 0.35, 1)):
        zorder = 2 if in_front[i] and in_front[j] else 0
        axis.plot(*prototypes[:, [i, j]], color="0.5", linewidth=1, zorder=zorder)
    for visible, zorder in ((in_front, 3), (~in_front, 0)):
        dots = {"color": "C0", "s": 50, "alpha": 1, "depthshade": False}
        axis.scatter(*prototypes[:, visible], zorder=zorder, **dots)
    axis.set_title(f"{title}: largest cosine {largest:.2f}", loc="center")
    axis.set_box_aspect((1, 1, 1), zoom=1.5)
    axis.view_init(elev=np.degrees(elevation), azim=np.degrees(azimuth))
    axis.set_axis_off()
figure.suptitle("Twelve prototypes spread over the sphere; lines join neighbours")
plt.show()

# %%
# Now training on a circle, with seven prototypes for five classes. In each step, a random batch
# updates the class means, ``assign_prototypes`` chooses again, and the batch moves down the
# gradient of ``prototype_loss``. The classes start close to one another, so that the first choices
# are not final.

num_classes, num_samples, batch_size = 5, 40, 10
rng = np.random.default_rng(2)
labels = np.arange(num_samples) % num_classes
angles = np.array([0.4, 1.0, 1.6, 2.2, 2.8])[labels] + rng.normal(0, 1.0, num_samples)
features = jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], axis=1))
prototypes = jaxloss.uniform_prototypes(jax.random.key(1), 7, 2, num_steps=300)


@jax.jit
def step(features, means, rows):
    """Returns the features, the means and the assignment after a batch of these rows."""
    batch, batch_labels = features[rows], jnp.asarray(labels)[rows]
    means = jaxloss.update_class_means(means, batch, batch_labels, decay=0.5)
    assignment = jaxloss.assign_prototypes(means, prototypes)

    def loss(batch):
        return jaxloss.prototype_loss(batch, batch_labels, prototypes, assignment=assignment)

    gradient = batch_size * jax.grad(loss)(batch)
    return features.at[rows].add(-0.2 * gradient), means, assignment


history = []
means = jnp.zeros((2, num_classes))
for _ in range(121):
    rows = rng.choice(num_samples, batch_size, replace=False)
    moved, means, assignment = step(features, means, rows)
    history.append(tuple(np.asarray(array) for array in (features, means, assignment)))
    features = moved

# %%
# Large rings are prototypes, filled with the class that has chosen them. Small markers inside the
# circle are features, and a line leads from each class mean to the prototype of the class.

figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.9))
for axis, number in zip(axes, (0, 10, 120), strict=True):
    points, means, assignment = history[number]
    units = points / np.linalg.norm(points, axis=1, keepdims=True)
    axis.add_patch(plt.Circle((0, 0), 1, fill=False, color="0.85"))
    axis.plot(*np.asarray(prototypes), "o", color="white", markeredgecolor="0.4", markersize=12)
    for label, marker in enumerate("os^Dv"):
        style = {"color": f"C{label}"}
        chosen = np.asarray(prototypes)[:, assignment[label]]
        axis.plot(*np.stack([0.7 * means[:, label], 0.93 * chosen], 1), linewidth=1.2, **style)
        axis.plot(*0.85 * units[labels == label].T, marker, markersize=4.5, alpha=0.75, **style)
        axis.plot(*chosen, marker, markersize=7, **style)
    axis.set_title(f"Step {number}")
    axis.set(aspect="equal", xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
figure.suptitle("Five classes choose among seven prototypes")
plt.show()

# %%
# The assignment over the training: it moves at first, and settles when the classes have spread.

by_angle = np.argsort(np.arctan2(*np.asarray(prototypes)[::-1]))
place = np.argsort(by_angle) + 1  # Of each prototype on the circle.
assignments = np.stack([assignment for _, _, assignment in history])
figure, axis = plt.subplots(figsize=(7.5, 2.8))
for label, marker in enumerate("os^Dv"):
    places = place[assignments[:, label]] + 0.06 * (label - 2)
    axis.step(range(121), places, where="post", color=f"C{label}", linewidth=1.5)
    axis.plot([0, 120], places[[0, -1]], marker, color=f"C{label}", label=f"class {label + 1}")
axis.set(xlabel="step", ylabel="prototype on the circle", yticks=range(1, 8))
axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
figure.suptitle("The prototype of each class, step by step")
plt.show()
