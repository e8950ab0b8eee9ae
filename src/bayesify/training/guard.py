"""The guard of a step: gradients that are not finite change nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bayesify.predictor import norms_by_model

CHECK_EVERY = 64
"""Steps on a GPU between two looks at the flag that says whether all of them were finite."""


_Slot = tuple[nn.Module, str, Tensor]
"""A buffer with its owner and its name there."""


class NotFiniteError(ValueError):
    """Gradients of a batch are not finite; neither parameters nor buffers nor the optimizer have seen them."""

    def __init__(self, names: list[str], batch: int) -> None:
        more = f" and {len(names) - 3} more parameters" if len(names) > 3 else ""
        super().__init__(
            f"the gradient of {', '.join(names[:3])}{more} is not finite; the step was not taken (look for a root, logarithm "
            "or quotient at 0 in the network, and for examples far outside of the others; lower the learning rate)"
        )
        self.batch = batch


class Guard:
    """Looks at the norm of the gradients that a step uses before it is taken, and keeps what a forward pass changes.

    Where reading a number waits for nothing (CPU), or the optimizer cannot be told on the device, `check` raises at once. On
    a GPU with a fused optimizer it sets a flag on the device, with which the optimizer leaves parameters and its own state
    alone, in this step and in those that follow; `read` raises for the first of them.

    Or it skips such steps: models whose gradients are not finite then keep their rows of parameters and of the optimizer's state.

    Args:
        module: Owner of parameters and buffers.
        optimizer: Whose steps are guarded; `None` for steps without one, of which only buffers are kept.
        skips: Of how many models, each with its own row of every parameter, steps are skipped; `None` raises.

    Attributes:
        finite: Which models' gradients were finite in the last step, [R], where steps are skipped.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, skips: int | None = None) -> None:
        self._module, self._optimizer, self._skips = module, optimizer, skips
        groups = [] if optimizer is None else optimizer.param_groups
        stepped = {id(value) for group in groups for value in group["params"]}
        named = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
        self._named = [(name, value) for name, value in named if id(value) in stepped or optimizer is None]
        device = named[0][1].device
        self.deferred = device.type == "cuda" and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self.flag = torch.zeros((), device=device)  # 1 once a gradient was not finite
        self._batch = torch.zeros((), dtype=torch.int64, device=device)  # the first such batch
        self._which = torch.zeros(len(self._named), dtype=torch.bool, device=device)  # and its parameters
        self.finite = torch.ones(skips or 1, dtype=torch.bool, device=device)
        self._kept: list[tuple[list[_Slot], Tensor]] = []
        self.keep_buffers()

    def begin(self) -> None:
        """Begin a step."""
        self.finite.fill_(True)

    def check(self, batch: int | Tensor) -> Tensor:
        """Look at the gradients as they are; the norm of all of them. `batch` was added last, a tensor in a captured step.

        The norm is over squares, which is what optimizers keep: a gradient whose square overflows counts as not finite.

        Raises:
            NotFiniteError: If they are not finite and this can be told at once; buffers are set back.
        """
        grads = {name: parameter.grad for name, parameter in self._named if parameter.grad is not None}
        if not grads:
            return self.flag.new_zeros(())
        if self._skips is not None:
            return self._leave_out(list(grads.values()), self._skips)
        values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads.values()]
        found = dict(zip(grads, torch._foreach_norm(values), strict=True))
        zero = self.flag.new_zeros(())
        norms = torch.stack([found.get(name, zero).to(zero.device) for name, _ in self._named])
        total = torch.linalg.vector_norm(norms)
        which = ~torch.isfinite(norms)
        if not self.deferred:
            if not bool(torch.isfinite(total)):
                self.restore()
                raise NotFiniteError(self._names(which), int(batch))
            return total
        first = (self.flag == 0) & ~torch.isfinite(total)
        self._which.copy_(torch.where(first, which, self._which))
        self._batch.copy_(torch.where(first, batch, self._batch))
        self.flag.copy_(torch.where(first, 1.0, self.flag))
        return total

    def _leave_out(self, grads: list[Tensor], num_models: int) -> Tensor:
        """Set the gradients of models where they are not finite to 0; the norm of all that is left."""
        norms = norms_by_model(grads, num_models)
        self.finite &= norms.isfinite()
        if norms.is_cuda or not bool(self.finite.all()):
            for grad in grads:
                grad.copy_(_where(self.finite, grad, torch.zeros_like(grad)))
        return torch.linalg.vector_norm(torch.where(self.finite, norms, 0.0))

    def step(self) -> None:
        """The optimizer's step, which on a GPU does nothing once the flag is set."""
        optimizer = self._optimizer
        assert optimizer is not None
        if self._skips is not None:
            self._step_of_some(optimizer)
            return
        if self.deferred:
            optimizer.found_inf = self.flag  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            if self.deferred:
                del optimizer.found_inf  # type: ignore[attr-defined]

    @torch.no_grad()
    def _step_of_some(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step, after which models whose gradients are not finite are as they were before it."""
        some = self.finite.is_cuda or not bool(self.finite.all())
        held = [value.detach() for _, value in self._named] if some else []
        for _, value in self._named if some else ():
            held += [
                part for part in optimizer.state[value].values() if torch.is_tensor(part) and part.shape == value.shape
            ]
        before = [part.clone() for part in held]
        optimizer.step()
        for part, earlier in zip(held, before, strict=True):
            part.copy_(_where(self.finite, part, earlier))

    def read(self) -> None:
        """Raise for the first batch since the last look whose gradients were not finite; a wait for the device.

        Raises:
            NotFiniteError: If there was one.
        """
        if self.deferred and bool(self.flag):
            self.restore()
            raise NotFiniteError(self._names(self._which), int(self._batch))

    def _names(self, which: Tensor) -> list[str]:
        names = [name for (name, _), bad in zip(self._named, which.tolist(), strict=True) if bad]
        return names or ["all parameters together"]  # whose norms are finite one by one

    # -- buffers ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Take the module's buffers, such as statistics of batch normalization, as those of the last good step."""
        groups: dict[tuple[torch.device, torch.dtype], list[_Slot]] = {}
        for part in self._module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    groups.setdefault((buffer.device, buffer.dtype), []).append((part, name, buffer))
        now = [(slots, torch.cat([slot[2].detach().reshape(-1) for slot in slots])) for slots in groups.values()]
        if not self.deferred or [len(flat) for _, flat in self._kept] != [len(flat) for _, flat in now]:
            self._kept = now
            return
        for (_, kept), (_, flat) in zip(self._kept, now, strict=True):  # in place, where a captured step finds it again
            kept.copy_(torch.where(self.flag.to(flat.device) > 0, kept, flat))

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers back to those of the last good step."""
        for slots, flat in self._kept:
            parts = flat.split([slot[2].numel() for slot in slots])
            for (part, name, buffer), values in zip(slots, parts, strict=True):
                buffer.copy_(values.view_as(buffer))
                part._buffers[name] = buffer  # where the network's code has assigned another tensor


def _where(finite: Tensor, values: Tensor, otherwise: Tensor) -> Tensor:
    """Rows of models that are finite, and others in place of the rest."""
    return torch.where(finite.view(-1, *[1] * max(0, values.ndim - 1)), values, otherwise).view_as(values)
