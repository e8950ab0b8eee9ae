"""Weights that multiply without being materialized."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bayesify.maths.noise import standard_normal

Rule = Callable[..., Any]
Own = TypeVar("Own", bound=Rule)


class StructuredWeight(Tensor):
    """A drawn weight that answers some functions by its own rule and is a plain tensor for all others.

    A subclass is made by `wrap` from the arguments that it takes, first its components (plain tensors), then the rest; it says how
    to materialize the plain tensor, and registers rules with `rule(F.linear)`. Wherever a network uses it in a function with a
    rule, the rule runs and the weight is never materialized; everywhere else it is materialized first. Like any draw it may carry a
    leading axis of draws in each of its components; `vmap` then removes that axis from each.

    Attributes:
        components_: The plain tensors that make up the weight.
        static_: The other arguments that it is made of.
    """

    components_: tuple[Tensor, ...]
    static_: tuple[Any, ...]

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
            lambda weight: (list(weight.components_), weight.static_),
            rebuild,
            serialized_type_name=f"bayesify.{cls.__qualname__}",
        )

    @classmethod
    def rule(cls, *functions: Callable[..., Any]) -> Callable[[Own], Own]:
        """Register a rule for torch functions; it is called with the function's own arguments."""

        def register(own: Own) -> Own:
            cls.rules |= dict.fromkeys(functions, own)
            return own

        return register

    @classmethod
    def wrap(cls, shape: Sequence[int], like: Tensor, components: tuple[Tensor, ...], static: tuple[Any, ...]) -> Self:
        """The weight of a shape, with the type and device of one of its components."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )
        made.components_, made.static_ = components, static
        return made

    @classmethod
    def from_components(cls, components: Iterable[Tensor], static: tuple[Any, ...]) -> Self:
        """The weight from its components and its other arguments."""
        make: Any = cls
        found: Self = make(*components, *static)
        return found

    @abstractmethod
    def materialize(self) -> Tensor:
        """The plain tensor that this weight stands for."""

    def times(self, factor: float) -> Tensor:
        """The weight multiplied by a number."""
        return self.materialize() * factor

    def at(self, index: int | slice) -> Self:
        """One draw, or a slice of draws, out of a weight that carries the axis of draws."""
        return self.from_components((component[index] for component in self.components_), self.static_)

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """All draws one by one, out of a weight that carries the axis of draws."""
        parts = zip(*(component.unbind(dim) for component in self.components_), strict=True)
        return tuple(self.from_components(part, self.static_) for part in parts)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.from_components((component.clone() for component in self.components_), self.static_)

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

    The last two arguments of a subclass are the source of the noise and the weight's name, for errors.

    Attributes:
        examples_: Rows of the batch in this pass; 0 before it.
        used_: Whether a rule has drawn noise for each example in this pass.
        materialized_: The plain draw of the weight, once there is one.
    """

    batchable = False
    examples_: int = 0
    used_: bool = False
    materialized_: Tensor | None = None

    @abstractmethod
    def draw(self) -> Tensor:
        """A plain draw of the weight."""

    def materialize(self) -> Tensor:
        """One draw of the weight, the same for all examples and in every use (a cell uses its weights at each step)."""
        self.check_unused()
        if self.materialized_ is None:
            self.materialized_ = self.draw()
        return self.materialized_

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Standard normal numbers of a shape, with the type and device of a tensor."""
        return standard_normal(math.prod(shape), like, self.static_[-2]).view(shape)

    def is_local(self, x: Tensor) -> bool:
        """Whether the rows of an input are the pass's examples, and no plain draw was used yet."""
        return x.shape[0] == self.examples_ and self.materialized_ is None

    def begin_pass(self, num_examples: int) -> None:
        """Noise is for the examples of this pass."""
        self.examples_, self.used_ = num_examples, False

    def check_unused(self) -> None:
        """Raise `UsedAgain` where the noise of an earlier use cannot be had again."""
        if self.used_:
            raise UsedAgain(self.static_[-1])


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
