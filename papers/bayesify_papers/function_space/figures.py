"""Figures of the toy problems: function-space and mean-field inference side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bayesify.datasets import toy
from bayesify_papers.shared import figures

TITLES = {"fsvi": "function space", "mfvi": "mean field", "ensemble": "ensemble"}


def draw(problem: str, models: Mapping[str, Any], path: Path) -> None:
    """Draw one panel per model, for seed 0.

    Args:
        problem: `"snelson"` or `"two_moons"`.
        models: Models with `predict`, by method.
    """
    with figures.panels(path, 1, len(models), (5 * len(models), 4), kinds=("png",), sharey=True) as axes:
        for axis, (method, model) in zip(axes, models.items(), strict=True):
            axis.set_title(TITLES[method])
            (_regression if problem == "snelson" else _classification)(axis, model)


def _regression(axis: Any, model: Any) -> None:
    from bayesify_papers.function_space.toy import snelson

    data = snelson(0)
    width = float(data.x.max() - data.x.min())
    grid = torch.linspace(float(data.x.min()) - 2 * width, float(data.x.max()) + 2 * width, 300)[:, None]
    prediction = model.predict(grid, 200, generator=torch.Generator().manual_seed(0), keep_outputs=True)
    x, mean, std = (part[:, 0].numpy() for part in (grid, prediction.mean, prediction.epistemic.sqrt()))
    for line in prediction.outputs[:10, :, 0].numpy():
        axis.plot(x, line, color="tab:blue", alpha=0.3, linewidth=0.8)
    axis.fill_between(x, mean - 2 * std, mean + 2 * std, color="tab:blue", alpha=0.2, linewidth=0)
    axis.plot(x, mean, color="black", linewidth=1)
    axis.plot(data.x[:, 0].numpy(), data.y[:, 0].numpy(), ".", color="tab:red", markersize=3)
    axis.set_ylim(-8, 8)


def _classification(axis: Any, model: Any) -> None:
    data = toy.two_moons(noise_std=0.1, seed=0)
    lines = torch.linspace(-6, 7, 80)
    second, first = torch.meshgrid(lines, lines, indexing="ij")
    grid = torch.stack((first, second), dim=-1).reshape(-1, 2)
    entropy = model.predict(grid, 100, generator=torch.Generator().manual_seed(0)).entropy.reshape(80, 80)
    ends = lines.numpy()
    shades = axis.pcolormesh(ends, ends, entropy.numpy(), vmin=0, vmax=0.7, cmap="viridis", shading="nearest")
    axis.figure.colorbar(shades, ax=axis, label="entropy, nats")
    axis.scatter(data.x[:, 0].numpy(), data.x[:, 1].numpy(), c=data.y.numpy(), cmap="coolwarm", s=4)
