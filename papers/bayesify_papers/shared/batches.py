"""Batches of tensors that lie on the device already."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


class MemoryBatches:
    """Shuffled batches; each pass has its own order, made from torch's global random numbers, which `fit` seeds.

    Args:
        x: Inputs, [N, ...].
        y: Targets, [N, ...].
        batch: Examples in a batch.
        augment: What is done to the inputs of each batch, such as `mirror_and_shift`; nothing by default.
        rest: Whether a last batch that is not full is kept.
        passes: Over the data, each in its own order, in one iteration: for data so small that epochs cost more than steps.

    Attributes:
        dataset: The rows, whose number is N also where an iteration has several passes.

    Raises:
        ValueError: If there is not one full batch.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch: int,
        augment: Callable[[Tensor], Tensor] | None = None,
        *,
        rest: bool = False,
        passes: int = 1,
    ) -> None:
        if not 1 <= batch <= len(x):
            raise ValueError(f"MemoryBatches: batch={batch} of {len(x)} examples; give 1 to {len(x)}")
        self.x, self.y, self.batch, self.augment, self.passes, self.dataset = x, y, batch, augment, passes, x
        self.count = -(-len(x) // batch) if rest else len(x) // batch

    def __len__(self) -> int:
        return self.passes * self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.passes):
            order = torch.randperm(len(self.x))[: self.count * self.batch].to(self.x.device)
            for index in order.split(self.batch):
                x = self.x[index]
                yield (self.augment(x) if self.augment else x), self.y[index]


class RandomBatches:
    """Batches of rows drawn with replacement by torch's global random numbers, a number of them per pass.

    Args:
        x: Inputs, [N, ...].
        y: Targets, [N, ...].
        batch: Examples in a batch.
        count: Batches per pass.

    Attributes:
        dataset: The rows, whose number is N though a pass has more of them.
    """

    def __init__(self, x: Tensor, y: Tensor, batch: int, count: int) -> None:
        self.x, self.y, self.batch, self.count, self.dataset = x, y, batch, count, x

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.count):
            rows = torch.randint(len(self.x), (self.batch,)).to(self.x.device)
            yield self.x[rows], self.y[rows]


def mirror_and_shift(x: Tensor, reach: int | None = None, *, mirror: bool = True, border: float = 0.0) -> Tensor:
    """Each image mirrored or not, and shifted by its own number of pixels under a border (torch's random numbers).

    Args:
        x: Images, [B, C, H, W].
        reach: The most pixels; default: an eighth of the side.
        mirror: Whether half of the images are mirrored.
        border: What moves in from outside.
    """
    count, _, height, width = x.shape
    reach = max(1, width // 8) if reach is None else reach
    rows, columns = _sent(torch.randint(-reach, reach + 1, (2, count, 1)), x.device)
    mirrored = _sent(torch.rand(count, 1) < (0.5 if mirror else 0.0), x.device)
    up = torch.arange(height, device=x.device) + rows + reach  # [B, H]
    across = torch.arange(width, device=x.device)
    across = torch.where(mirrored, across.flip(0), across) + columns + reach  # [B, W]
    padded = nn.functional.pad(x, (reach,) * 4, value=border)
    example = torch.arange(count, device=x.device)[:, None, None]
    return padded.movedim(1, -1)[example, up[:, :, None], across[:, None]].movedim(-1, 1)  # [B, C, H, W]


def cut_out(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Each image with a square of one value at a place of its own, cut by the border (DeVries & Taylor 2017).

    Args:
        x: Images, [B, C, H, W].
        size: Side of the square in pixels; 0 leaves the images as they are.
        value: What the square holds.
    """
    if not size:
        return x
    count, _, height, width = x.shape
    top = _sent(torch.randint(0, height, (count, 1)), x.device) - size // 2
    left = _sent(torch.randint(0, width, (count, 1)), x.device) - size // 2
    down, across = torch.arange(height, device=x.device) - top, torch.arange(width, device=x.device) - left
    inside_rows, inside_columns = (down >= 0) & (down < size), (across >= 0) & (across < size)  # [B, H], [B, W]
    return x.masked_fill((inside_rows[:, :, None] & inside_columns[:, None])[:, None], value)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Values of the CPU on a device, without waiting for the steps that it has still to do."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
