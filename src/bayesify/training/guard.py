"""Guard of a step: a step with non-finite gradients changes nothing."""

import torch
from torch import Tensor, nn

from bayesify.predictor import norms_by_model

STEPS_BETWEEN_CHECKS = 64
"""Number of steps after which the flag for non-finite gradients is read on a GPU."""


_Slot = tuple[nn.Module, str, Tensor]
"""Owner of a buffer, its name in the owner, and the buffer."""
_Group = tuple[list[_Slot], Tensor]
"""Buffers, and a copy of their values with one row per model. There is one row if steps are not skipped."""


class NotFiniteError(ValueError):
    """Error for a batch with non-finite gradients; parameters, buffers and optimizer are unchanged."""

    def __init__(self, names: list[str], batch: int) -> None:
        more = f" and {len(names) - 3} more parameters" if len(names) > 3 else ""
        super().__init__(
            f"the gradient of {', '.join(names[:3])}{more} is not finite; the step was not taken (look for a square "
            "root, logarithm or division at 0 in the network, and for outliers among the examples; lower the learning "
            "rate)"
        )
        self.batch = batch


class Guard:
    """Checks the norm of the gradients before a step, and stores the buffers that a forward pass changes.

    On a CPU, or if the optimizer cannot read a flag on the device, `check` raises an error at once. On a GPU with a fused
    optimizer (see `GraphOptimizer`), `check` sets a flag on the device instead, to avoid waiting. The flag makes the optimizer
    leave parameters and its own state unchanged in this step and all later steps. `read` raises an error for the first step with
    non-finite gradients.

    If `skips` (the number of models) is given, the guard skips steps with non-finite gradients instead of raising an error.
    The parameters, buffers and optimizer state of models with non-finite gradients then stay unchanged. `finite` [R] says which
    models took the last step. Without an optimizer, the guard only stores buffers.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, skips: int | None = None) -> None:
        self._parts, self._optimizer, self._skips = list(module.modules()), optimizer, skips
        groups = [] if optimizer is None else optimizer.param_groups
        stepped = {id(value) for group in groups for value in group["params"]}
        named = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
        self._named = [(name, value) for name, value in named if id(value) in stepped or optimizer is None]
        device = named[0][1].device
        self.deferred = device.type == "cuda" and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self.flag = torch.zeros((), device=device)  # 1 once a gradient was not finite
        self._batch = torch.zeros((), dtype=torch.int64, device=device)  # first batch with a non-finite gradient
        # The parameters whose gradient was not finite in that batch.
        self._which = torch.zeros(len(self._named), dtype=torch.bool, device=device)
        self.finite = torch.ones(skips or 1, dtype=torch.bool, device=device)
        self._kept: list[_Group] = []
        self.keep_buffers()

    def begin(self) -> None:
        """Begin a step."""
        self.finite.fill_(True)

    def check(self, batch: int | Tensor) -> Tensor:
        """Check the current gradients and return their norm. `batch` is the number of the last batch; in a captured
        step, it is a tensor.

        The norm is computed from squares, as in optimizers, so a gradient whose square overflows counts as non-finite. For a
        non-finite gradient, the guard restores buffers and raises `NotFiniteError`, unless it skips steps or defers the error to
        `read`.
        """
        grads = {name: parameter.grad for name, parameter in self._named if parameter.grad is not None}
        if not grads:
            return self.flag.new_zeros(())
        if self._skips is not None:
            return self._leave_out(self._skips)
        values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads.values()]
        found = dict(zip(grads, torch._foreach_norm(values), strict=True))
        zero = self.flag.new_zeros(())
        norms = torch.stack([found.get(name, zero).to(zero.device) for name, _ in self._named])
        total: Tensor = torch.linalg.vector_norm(norms)
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

    def _leave_out(self, num_models: int) -> Tensor:
        """Set all gradients of models with a non-finite gradient to 0. Return the norm of the remaining gradients."""
        grads = []
        for _, parameter in self._named:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                grads.append(parameter.grad.values())
            elif parameter.grad is not None:
                grads.append(parameter.grad)
        norms = norms_by_model(grads, num_models)
        self.finite &= norms.isfinite()
        if self._may_skip():
            for grad in grads:
                grad.copy_(_where(self.finite, grad, torch.zeros_like(grad)))
        total: Tensor = torch.linalg.vector_norm(torch.where(self.finite, norms, 0.0))
        return total

    def _may_skip(self) -> bool:
        """Whether some model might skip this step; always true on a GPU, because reading the flags would wait for the device."""
        return self.finite.is_cuda or not bool(self.finite.all())

    def step(self) -> None:
        """Take the optimizer's step. After a non-finite gradient, the step of a fused optimizer on a GPU does nothing."""
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
        """Take the optimizer's step, then undo it for models with non-finite gradients."""
        held: list[Tensor] = []
        for _, value in self._named if self._may_skip() else ():
            parts = (value.detach(), *optimizer.state[value].values())
            held += [part for part in parts if torch.is_tensor(part) and part.shape == value.shape]
        before = [part.clone() for part in held]
        optimizer.step()
        for part, earlier in zip(held, before, strict=True):
            part.copy_(_where(self.finite, part, earlier))

    def read(self) -> None:
        """Wait for the device, and raise `NotFiniteError` for the first batch with non-finite gradients since the last call."""
        if self.deferred and bool(self.flag):
            self.restore()
            raise NotFiniteError(self._names(self._which), int(self._batch))

    @property
    def taken(self) -> Tensor:
        """Whether the last step was taken, as a scalar. This property works only for a single model."""
        return self.finite[0] if self._skips is not None else self.flag == 0

    def _names(self, which: Tensor) -> list[str]:
        names = [name for (name, _), bad in zip(self._named, which.tolist(), strict=True) if bad]
        return names or ["all parameters together"]  # each norm is finite, but the total norm is not

    # -- buffers ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Store the module's current buffers, such as BatchNorm statistics, as the buffers of the last good step."""
        now = self._buffers()
        if not self.deferred or not self._fits(now):
            self._kept = now
            return
        for (_, kept), (_, flat) in zip(self._kept, now, strict=True):
            # Copy in place, because a captured step holds the address.
            kept.copy_(torch.where(self.flag.to(flat.device) > 0, kept, flat))

    def _buffers(self) -> list[_Group]:
        """The buffers, grouped by device and type, and the concatenated values of each group. Sparse buffers, such as the adjacency
        of a graph, are left out."""
        groups: dict[tuple[torch.device, torch.dtype], list[_Slot]] = {}
        for part in self._parts:
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.layout is torch.strided:
                    groups.setdefault((buffer.device, buffer.dtype), []).append((part, name, buffer))
        return [(slots, torch.cat([self._rows(buffer) for _, _, buffer in slots], 1)) for slots in groups.values()]

    def _rows(self, buffer: Tensor) -> Tensor:
        return buffer.detach().reshape(len(self.finite), buffer.numel() // len(self.finite))

    def _fits(self, now: list[_Group]) -> bool:
        return [flat.shape for _, flat in self._kept] == [flat.shape for _, flat in now]

    @torch.no_grad()
    def end(self) -> None:
        """End a step: restore the buffers of models that skip it, then store the current buffers."""
        if self._skips is not None and self._may_skip():
            now = self._buffers()
            if self._fits(now):
                for (slots, kept), (_, flat) in zip(self._kept, now, strict=True):
                    _set(slots, _where(self.finite.to(flat.device), flat, kept))
            elif not bool(self.finite.any()):
                self.restore()
        self.keep_buffers()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers of the last good step."""
        for slots, flat in self._kept:
            _set(slots, flat)


def _set(slots: list[_Slot], flat: Tensor) -> None:
    """Write values, with one row per model, into the buffers, even if the network has replaced a buffer."""
    widths = [slot[2].numel() // len(flat) for slot in slots]
    for (part, name, buffer), values in zip(slots, flat.split(widths, 1), strict=True):
        expanded = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
        if not expanded:  # no operation can change an expanded view in place
            buffer.copy_(values.reshape(buffer.shape))
        part._buffers[name] = buffer


def _where(finite: Tensor, values: Tensor, otherwise: Tensor) -> Tensor:
    """Rows of `values` for models with finite gradients, and rows of `otherwise` for the other models."""
    if values.is_sparse:  # one model only
        return values if bool(finite) else otherwise
    return torch.where(finite.view(-1, *[1] * max(0, values.ndim - 1)), values, otherwise).view_as(values)
