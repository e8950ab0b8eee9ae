"""Batches of tensors that are already on the device."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class MemoryBatches:
    """Shuffled batches. Torch's global random numbers, which `fit` seeds, give each pass its own order.

    Args:
        x: Inputs, [N, ...].
        y: Targets, [N, ...].
        batch: Examples in a batch.
        augment: Function that transforms the inputs of each batch, such as `mirror_and_shift`; none by default.
        rest: Whether to keep a last batch that is not full.
        passes: Number of passes over the data in one iteration, each in its own order. Several passes save time if an epoch of
            small data costs more than its steps.

    Attributes:
        dataset: The N rows. Their number does not depend on `passes`.

    Raises:
        ValueError: If the data do not fill one batch.
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
    """Batches of rows drawn with replacement by torch's global random numbers.

    Args:
        x: Inputs, [N, ...].
        y: Targets, [N, ...].
        batch: Examples in a batch.
        count: Batches per pass.

    Attributes:
        dataset: The N rows. Their number does not depend on `count`.
    """

    def __init__(self, x: Tensor, y: Tensor, batch: int, count: int) -> None:
        self.x, self.y, self.batch, self.count, self.dataset = x, y, batch, count, x

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.count):
            rows = torch.randint(len(self.x), (self.batch,)).to(self.x.device)
            yield self.x[rows], self.y[rows]


def mirror_and_shift(
    x: Tensor, reach: int | None = None, *, mirror: bool = True, border: float | Tensor = 0.0
) -> Tensor:
    """Images that are randomly mirrored and shifted, each on its own, by torch's random numbers.

    Args:
        x: Images, [B, C, H, W].
        reach: Largest shift in pixels; by default an eighth of the side.
        mirror: Whether to mirror half of the images.
        border: Value of the pixels that move in from outside: a number, or a tensor [C, 1, 1] of one value per channel.
    """
    count, channels, height, width = x.shape
    reach = max(1, width // 8) if reach is None else reach
    rows, columns = _sent(torch.randint(-reach, reach + 1, (2, count, 1)), x.device)
    mirrored = _sent(torch.rand(count, 1) < (0.5 if mirror else 0.0), x.device)
    up = torch.arange(height, device=x.device) + rows + reach  # [B, H]
    across = torch.arange(width, device=x.device)
    across = torch.where(mirrored, across.flip(0), across) + columns + reach  # [B, W]
    padded = x.new_zeros(count, channels, height + 2 * reach, width + 2 * reach) + border
    padded[..., reach : reach + height, reach : reach + width] = x
    example = torch.arange(count, device=x.device)[:, None, None]
    return padded.movedim(1, -1)[example, up[:, :, None], across[:, None]].movedim(-1, 1)  # [B, C, H, W]


def cut_out(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Images in which a square at a random place has a constant value (DeVries & Taylor 2017). The border may cut the square.

    Args:
        x: Images, [B, C, H, W].
        size: Side of the square in pixels; 0 leaves the images as they are.
        value: Value of the square's pixels.
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
    """Values copied from the CPU to a device, without waiting for the device's queued work."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
