"""A Bayesian convolutional network on synthetic digits, and letters it never saw."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, metrics, posteriors

DIGITS = [
    "### #.# #.# #.# ###",
    ".#. ##. .#. .#. ###",
    "### ..# ### #.. ###",
    "### ..# .## ..# ###",
    "#.# #.# ### ..# ..#",
]
LETTERS = ["#.. #.. #.. #.. ###", "#.# #.# .#. #.# #.#", "### .#. .#. .#. .#."]


def images(glyphs: list[str], per_glyph: int, seed: int) -> tuple[Tensor, Tensor]:
    """Glyphs at random places of a noisy image, [N, 1, 8, 8], and their indices."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.2 * torch.randn(len(glyphs) * per_glyph, 1, 8, 8, generator=generator)
    y = torch.arange(len(glyphs)).repeat_interleave(per_glyph)
    shapes = [
        torch.tensor([[float(cell == "#") for cell in row] for row in glyph.split()])
        for glyph in glyphs
    ]
    rows = torch.randint(0, 4, (len(y),), generator=generator).tolist()
    cols = torch.randint(0, 6, (len(y),), generator=generator).tolist()
    for index, (label, row, col) in enumerate(zip(y.tolist(), rows, cols, strict=True)):
        x[index, 0, row : row + 5, col : col + 3] += shapes[label]
    return x, y


def main() -> None:
    torch.manual_seed(0)
    x, y = images(DIGITS, per_glyph=120, seed=0)
    x_test, y_test = images(DIGITS, per_glyph=60, seed=1)
    unseen, _ = images(LETTERS, per_glyph=100, seed=2)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, len(DIGITS)),
    )
    bnn = bayesify.bayesianize(
        net, posteriors.RankOne(components=4), likelihood=likelihoods.Categorical()
    )
    print(bnn.summary())
    loader = DataLoader(TensorDataset(x, y), batch_size=60, shuffle=True)
    bayesify.fit(bnn, loader, epochs=12, learning_rate=2e-2, seed=0, progress=False)

    prediction = bnn.predict(x_test, num_draws=16)
    print(
        "digits:",
        {
            key: round(value, 3)
            for key, value in metrics.evaluate(prediction, y_test).items()
        },
    )
    print("telling letters from digits:")
    for key, value in metrics.ood(
        prediction, bnn.predict(unseen, num_draws=16)
    ).items():
        print(f"  {key}: {value:.3f}")


if __name__ == "__main__":
    main()
