"""Draws docs/feature-space.svg, the animated picture of the home page.

    python docs/feature_space.py

Features of six classes on a sphere move down the gradient of the supervised contrastive loss, while
the sphere turns. Positions and losses are computed by jaxloss. An SVG is sharp at any size. Its
card is white, for light and dark pages. People who ask their system for less motion see the end.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxloss

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
SHAPES = (
    "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
    "M-4.5,-4.5h9v9h-9z",
    "M0,-6l5.5,9.5h-11z",
    "M0,-6l6,6l-6,6l-6,-6z",
    "M0,6l5.5,-9.5h-11z",
    "M-1.9,-5.7h3.8v3.8h3.8v3.8h-3.8v3.8h-3.8v-3.8h-3.8v-3.8h3.8z",
)
SECONDS = 11
FRAMES = 56
HOLD = (5, 18)  # Frames before the first step and after the last one.
CENTER, RADIUS = (190, 190), 160
CHART = (395, 600, 120, 300)  # Left, right, top, bottom.
SIZE = (640, 380)
loss_fn = partial(jaxloss.supervised_contrastive_loss, temperature=0.2)


def train(num_steps: int = 75, rate: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns features [steps, n, 3] before each step, losses [steps] and labels [n]."""
    labels = jnp.arange(108) % 6
    features = jax.random.normal(jax.random.key(3), (108, 3))

    def step(features, _):
        features = features / jnp.linalg.norm(features, axis=1, keepdims=True)
        loss, gradient = jax.value_and_grad(loss_fn)(features, labels)
        return features - rate * gradient, (features, loss)

    _, (path, losses) = jax.jit(lambda x: jax.lax.scan(step, x, length=num_steps))(features)
    return np.asarray(path), np.asarray(losses), np.asarray(labels)


def choose_steps(path: np.ndarray) -> np.ndarray:
    """Returns the step of each frame, such that the features move evenly between the holds."""
    moved = np.linalg.norm(np.diff(path, axis=0), axis=2).mean(axis=1).cumsum()
    targets = np.linspace(0, moved[-1], FRAMES - sum(HOLD))
    steps = np.searchsorted(moved, targets)
    return np.pad(steps, HOLD, mode="edge")


def seen(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns places [frames, n, 2] on the card and opacities [frames, n] as the sphere turns."""
    angles = np.linspace(0, 1.1 * np.pi, FRAMES)[:, None]
    x = points[..., 0] * np.cos(angles) + points[..., 1] * np.sin(angles)
    depth = points[..., 1] * np.cos(angles) - points[..., 0] * np.sin(angles)
    up, toward = 0.94 * points[..., 2] - 0.34 * depth, 0.94 * depth + 0.34 * points[..., 2]
    places = np.stack([CENTER[0] + RADIUS * x, CENTER[1] - RADIUS * up], axis=-1)
    return places, np.clip(0.62 + 0.6 * toward, 0.16, 1)


def animate(attribute: str, values: list[str], element: str = "animate", more: str = "") -> str:
    """Returns an element that moves an attribute through its values, again and again."""
    joined = ";".join(values)
    return (
        f'<{element} attributeName="{attribute}" {more}dur="{SECONDS}s" '
        f'repeatCount="indefinite" values="{joined}"/>'
    )


def draw() -> str:
    """Returns the SVG."""
    path, losses, labels = train()
    steps = choose_steps(path)
    places, opacities = seen(path[steps])
    left, right, top, bottom = CHART
    used = np.arange(steps[-1] + 1)
    across = left + (right - left) * used / used[-1]
    down = bottom - (bottom - top) * losses[used] / losses[0]
    curve = "M" + "L".join(f"{x:.0f},{y:.1f}" for x, y in zip(across, down, strict=True))

    def markers(moving: bool) -> str:
        marks = []
        for i, label in enumerate(labels):
            where = [f"{x:.0f},{y:.0f}" for x, y in places[:, i]]
            shown = [f"{value:.2f}".lstrip("0") for value in opacities[:, i]]
            motion = ""
            if moving:
                motion = animate("transform", where, "animateTransform", 'type="translate" ')
                motion += animate("opacity", shown)
            marks.append(
                f'<use href="#c{label}" transform="translate({where[-1]})" '
                f'opacity="{shown[-1]}">{motion}</use>'
            )
        dots = [f"{across[step]:.0f},{down[step]:.1f}" for step in steps]
        motion = animate("transform", dots, "animateTransform", 'type="translate" ')
        motion = motion if moving else ""
        dot = f'<circle r="6" fill="#222" transform="translate({dots[-1]})">{motion}</circle>'
        return "".join(marks) + dot

    style = 'stroke="#fff" stroke-width=".6" transform="scale(1.15)"'
    shapes = "".join(
        f'<path id="c{k}" d="{shape}" fill="{color}" {style}/>'
        for k, (shape, color) in enumerate(zip(SHAPES, COLORS, strict=True))
    )
    fade = animate("opacity", ["0", "1", "1", "0"], more='keyTimes="0;.04;.96;1" ')
    (width, height), (x, y) = SIZE, CENTER
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
 width="{width}" height="{height}" font-family="system-ui,Helvetica,Arial,sans-serif" fill="#333">
<title>Features of six classes on a turning sphere gather class by class as the loss falls</title>
<style>.still{{display:none}}
@media (prefers-reduced-motion:reduce){{.moving{{display:none}}.still{{display:inline}}}}</style>
<defs>{shapes}<radialGradient id="s" cx=".4" cy=".35" r=".75"><stop stop-color="#fff"/>
<stop offset="1" stop-color="#e6e9ee"/></radialGradient></defs>
<rect width="{width}" height="{height}" rx="18" fill="#fff"/>
<circle cx="{x}" cy="{y}" r="{RADIUS}" fill="url(#s)" stroke="#d5d9e0"/>
<g fill="none" stroke="#444" stroke-width="2">
<path stroke="#999" stroke-width="1.2" d="M{left},{top - 18}V{bottom}H{right + 8}"/>
<path d="{curve}"/></g>
<text x="{left}" y="62" font-size="18" font-weight="600">108 features, 6 classes</text>
<text x="{left + 8}" y="{top - 8}" font-size="17">loss</text>
<text x="{right + 8}" y="{bottom + 24}" font-size="17" text-anchor="end">gradient steps</text>
<g class="moving">{fade}{markers(True)}</g>
<g class="still">{markers(False)}</g>
</svg>
"""


if __name__ == "__main__":
    Path(__file__).with_name("feature-space.svg").write_text(draw(), encoding="utf-8")
