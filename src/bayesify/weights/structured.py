"""Weights that multiply without being materialized."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from bayesify.maths.noise import Randomness, standard_normal

Rule = Callable[..., Any]
Own = TypeVar("Own", bound=Rule)


class StructuredWeight(Tensor):
    """A drawn weight that has its own rules for some functions and is a plain tensor for all other functions.

    The constructor of a subclass takes the components (plain tensors) first, then all other arguments. The constructor creates
    the weight with `wrap`. The subclass defines `materialize` and registers rules, for example with `rule(F.linear)`. For a
    function with a rule, the rule runs and the weight is never materialized. For any other function, the weight is materialized
    first. All components may have a leading axis of draws, which `vmap` then removes.

    Attributes:
        components_: The plain tensors that make up the weight.
        static_: The constructor's arguments that are not components.
    """

    components_: tuple[Tensor, ...]
    static_: tuple[Any, ...]

    rules: ClassVar[dict[Callable[..., Any], Rule]] = {}
    batchable: ClassVar[bool] = True
    """Whether `vmap` may run over the axis of draws; false if a rule draws its own noise."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.rules = dict(cls.rules)

        def rebuild(components: Any, static: Any) -> Any:
            parts = list(components)
            if not all(isinstance(part, Tensor) for part in parts):
                return parts  # `vmap` rebuilds the structure with axis numbers instead of tensors
            return cls.from_components(parts, static)

        pytree.register_pytree_node(
            cls,
            lambda weight: (list(weight.components_), weight.static_),
            rebuild,
            serialized_type_name=f"bayesify.{cls.__qualname__}",
        )

    @classmethod
    def rule(cls, *functions: Callable[..., Any]) -> Callable[[Own], Own]:
        """Register a rule for torch functions. The rule is called with the function's own arguments."""

        def register(own: Own) -> Own:
            cls.rules |= dict.fromkeys(functions, own)
            return own

        return register

    @classmethod
    def wrap(cls, shape: Sequence[int], like: Tensor, components: tuple[Tensor, ...], static: tuple[Any, ...]) -> Self:
        """The weight with a given shape, and with the type and device of one of its components."""
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
        """One draw, or a slice of draws, from a weight with an axis of draws."""
        return self.from_components((component[index] for component in self.components_), self.static_)

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """All draws separately, from a weight with an axis of draws."""
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
        """Call a function that has no rule, after materializing all structured weights in its arguments."""
        args, kwargs = plain((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.fallback(func, args, kwargs or {})


class UsedAgain(Exception):
    """Error for the second use of a weight with noise per example, because both uses would need the same noise."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name or 'a weight'} has separate noise for each example but is used more than once in a pass (called twice, or "
            "recomputed by checkpointing); use local_reparameterization=False"
        )
        self.name = name


class LocalWeight(StructuredWeight):
    """A weight with separate noise for each example of a batch, if its first use sees each example once.

    The last two arguments of a subclass are the source of the noise and the weight's name, which error messages show.
    """

    batchable = False
    examples_: int = 0  # number of rows of the batch in this pass; 0 before the pass
    used_: bool = False  # whether a rule has drawn noise per example in this pass
    materialized_: Tensor | None = None  # the plain draw of the weight, after the first draw

    @abstractmethod
    def draw(self) -> Tensor:
        """A plain draw of the weight."""

    def materialize(self) -> Tensor:
        """One draw of the weight, the same for all examples and all uses (a recurrent cell uses its weights at each step)."""
        self.check_unused()
        if self.materialized_ is None:
            self.materialized_ = self.draw()
        return self.materialized_

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Standard normal numbers of a given shape, with the type and device of `like`."""
        return standard_normal(math.prod(shape), like, self.static_[-2]).view(shape)

    def is_local(self, x: Tensor) -> bool:
        """Whether the rows of an input are the pass's examples, and no plain draw has been used."""
        return x.shape[0] == self.examples_ and self.materialized_ is None

    def begin_pass(self, num_examples: int) -> None:
        """Start a pass over a number of examples. Each of these examples then gets its own noise."""
        self.examples_, self.used_ = num_examples, False

    def check_unused(self) -> None:
        """Raise `UsedAgain` if an earlier use has drawn noise per example, because that noise cannot be recovered."""
        if self.used_:
            raise UsedAgain(self.static_[-1])


_METADATA = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point, Tensor.is_complex}
_METADATA |= {Tensor.stride, Tensor.__len__, Tensor.is_contiguous, Tensor.__repr__, torch.is_floating_point}


def plain(tree: Any) -> Any:
    """Materialize every structured weight in a nested structure of arguments."""
    return pytree.tree_map_only(
        StructuredWeight,
        lambda weight: weight.materialize(),
        tree,
        is_leaf=lambda leaf: isinstance(leaf, StructuredWeight),
    )


# -- local reparameterization: Gaussian weights that add their noise to a layer's output ------------------------------


class LocalGaussian(LocalWeight):
    r"""A Gaussian weight whose noise is drawn for each example at the output of a linear map.

    For independent $W_{ij} \sim \mathcal{N}(m_{ij}, s_{ij}^2)$, the output $y = W x + b$ of one example is Gaussian
    with independent entries $\mathcal{N}(m x + m_b, s^2 x^2 + s_b^2)$. Drawing $y$ instead of $W$ reduces the
    gradient's variance (Kingma et al. 2015, eq. 6). The output of each example keeps its marginal distribution, but the joint
    distribution over examples is lost. Only the training objective therefore uses this weight.

    The rule needs a linear map that sees each example once: inputs [B, d_in] in one call. One plain draw of the weight is used in
    layers with positions (sequences, convolutions), in layers whose rows are not the batch's examples, and in all other
    functions. A second call of a layer raises `UsedAgain`, and the objective is then computed again with a plain draw.

    Shapes:
        mean, variance: the weight's shape, optionally with a leading axis of draws.
    """

    def __new__(cls, mean: Tensor, variance: Tensor, noise: Randomness = None, name: str = "") -> Self:
        return cls.wrap(mean.shape, mean, (mean, variance), (noise, name))

    def times(self, factor: float) -> Self:
        mean, variance = self.components_
        return self.from_components((mean * factor, variance * factor**2), self.static_)

    def draw(self) -> Tensor:
        mean, variance = self.components_
        return mean + variance.sqrt() * self.normal(mean.shape, mean)

    def use(self) -> tuple[Tensor, ...]:
        """Mean and variance, for a rule that draws noise for each example."""
        self.check_unused()
        self.used_ = True
        return self.components_


@LocalGaussian.rule(F.linear)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, LocalGaussian) or isinstance(x, LocalGaussian):
        return NotImplemented
    if x.ndim != 2 or not weight.is_local(x):
        return NotImplemented
    mean, variance = weight.use()
    bias_mean, bias_variance = bias.use() if isinstance(bias, LocalGaussian) else (bias, None)
    noise = weight.normal((len(x), mean.shape[0]), mean)
    output, spread = F.linear(x, mean, bias_mean), F.linear(x.square(), variance, bias_variance)
    # Clamp the variance: if all inputs are 0, the variance is 0, and its square root has no gradient.
    std = spread.clamp_min(torch.finfo(spread.dtype).tiny).sqrt()
    return torch.addcmul(output, std, noise.to(output.dtype))
