"""Weights that multiply without being materialized."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Rule = Callable[..., Tensor]


class StructuredWeight(Tensor):
    """A drawn weight that answers some functions by its own rule and is a plain tensor for all others.

    A subclass holds its components (plain tensors), says how to materialize the plain tensor, and registers rules with
    `rule(F.linear)`. Wherever a network uses it in a function with a rule, the rule runs and the weight is never
    materialized; everywhere else it is materialized first. Like any draw it may carry a leading axis of draws in each of its
    components; `vmap` then removes that axis from each.

    Components must be listed by `components()` in the order in which `from_components` takes them.
    """

    rules: ClassVar[dict[Callable[..., Any], Rule]] = {}
    batchable: ClassVar[bool] = True
    """Whether `vmap` may run over its axis of draws; a rule that draws noise of its own says no."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.rules = dict(cls.rules)

        def rebuild(components: Any, static: Any) -> Any:
            parts = list(components)
            if not all(isinstance(part, Tensor) for part in parts):
                return parts  # `vmap` puts axis numbers in the place of tensors to see how many there are
            return cls.from_components(parts, static)

        pytree.register_pytree_node(
            cls,
            lambda weight: (list(weight.components()), weight.static()),
            rebuild,
            serialized_type_name=f"bayesify.{cls.__qualname__}",
        )

    @classmethod
    def rule(cls, function: Callable[..., Any]) -> Callable[[Rule], Rule]:
        """Register a rule for a torch function; it is called with the function's own arguments."""

        def register(own: Rule) -> Rule:
            cls.rules[function] = own
            return own

        return register

    @classmethod
    def wrap(cls, shape: torch.Size, like: Tensor) -> Self:
        """An empty shell of the given shape with the type and device of a component."""
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )

    @abstractmethod
    def components(self) -> tuple[Tensor, ...]:
        """The plain tensors that make up the weight."""

    def static(self) -> Any:
        """What `from_components` needs besides the components."""
        return None

    @classmethod
    @abstractmethod
    def from_components(cls, components: list[Tensor], static: Any) -> Self:
        """The weight from its components."""

    @abstractmethod
    def materialize(self) -> Tensor:
        """The plain tensor that this weight stands for."""

    def at(self, index: int | slice) -> Self:
        """One draw, or a slice of draws, out of a weight that carries the axis of draws."""
        return self.from_components([component[index] for component in self.components()], self.static())

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """All draws one by one, out of a weight that carries the axis of draws."""
        parts = zip(*(component.unbind(dim) for component in self.components()), strict=True)
        return tuple(self.from_components(list(part), self.static()) for part in parts)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.from_components([component.clone() for component in self.components()], self.static())

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = cls.rules.get(func)
        if rule is not None:
            answer = rule(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        if getattr(func, "__name__", "") == "__get__" or func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return cls.fallback(func, args, kwargs)

    @classmethod
    def fallback(cls, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Answer a function that has no rule: by the plain tensors."""
        args, kwargs = plain((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = plain((args, kwargs or {}))
        return func(*args, **kwargs)


class UsedAgain(Exception):
    """A weight that was drawn for each example is used a second time, where it would have to be the same."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name or 'a weight'} has noise of its own for each example and is used more than once in a pass (called twice, or "
            "recomputed by checkpointing); use local_reparameterization=False"
        )
        self.name = name


class LocalWeight(StructuredWeight):
    """A weight with noise of its own for each example of a batch, in the first use only if that sees each example once.

    Attributes:
        name_: Of the weight, for errors.
        examples_: Rows of the batch in this pass; 0 before it.
        used_: Whether a rule has drawn noise for each example in this pass.
    """

    batchable = False
    name_: str
    examples_: int
    used_: bool

    def start(self, name: str) -> Self:
        """Before any pass."""
        self.name_, self.examples_, self.used_ = name, 0, False
        return self

    def begin_pass(self, num_examples: int) -> None:
        """Noise is for the examples of this pass."""
        self.examples_, self.used_ = num_examples, False

    def check_unused(self) -> None:
        """Raise `UsedAgain` where the noise of an earlier use cannot be had again."""
        if self.used_:
            raise UsedAgain(self.name_)


_METADATA = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.stride,
    Tensor.__len__,
    Tensor.is_contiguous,
    Tensor.__repr__,
    torch.is_floating_point,
}


def plain(tree: Any) -> Any:
    """Form every structured weight in a nested structure of arguments."""
    return pytree.tree_map_only(
        StructuredWeight,
        lambda weight: weight.materialize(),
        tree,
        is_leaf=lambda leaf: isinstance(leaf, StructuredWeight),
    )
