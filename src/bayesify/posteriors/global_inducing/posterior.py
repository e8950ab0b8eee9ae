"""Global inducing points: each layer's weights depend on learned inputs that are propagated through the earlier layers."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from bayesify.arguments.checks import Count, Positive, checked
from bayesify.maths.constraints import raw_positive
from bayesify.maths.gamma import widened
from bayesify.maths.regression import RegressionFactors
from bayesify.maths.value_checks import should_check
from bayesify.posteriors.common.base import DrawRequest, Posterior
from bayesify.posteriors.global_inducing.inputs import InducingInputs, check_inputs, describe_inputs, first_examples
from bayesify.posteriors.global_inducing.likelihood import (
    MAX_ROUNDING_ERROR,
    NEGLIGIBLE_LOG_PRECISION,
    NETWORK_PRECISION,
    HalfPrecision,
    PriorScale,
    exact_float32,
    typical_scale,
)
from bayesify.posteriors.global_inducing.maps import LinearMap, check_targets, start_outputs, trace
from bayesify.priors import PriorDraw
from bayesify.running.inputs_and_outputs import each, stack
from bayesify.running.light_copies import EmptySlot
from bayesify.running.runner import Runner, SlowVmap
from bayesify.weights.catalog import owner_of
from bayesify.weights.named_parameters import NamedParameters
from bayesify.weights.structured import StructuredWeight

Step = Callable[[LinearMap, RegressionFactors | None], Tensor]


class _Gone(EmptySlot):
    """What the slots contain after the pass over the inducing inputs. The hooks that draw weights do not run again."""

    remedy = "use another posterior than GlobalInducing"


@dataclass(frozen=True)
class _Pass:
    careful: bool = False  # repair failed factorizations
    autocast: torch.dtype | None = None  # the type in which the step runs its data


class GlobalInducing(Posterior):
    r"""Bayesian linear regression in every layer, on inducing inputs propagated through the earlier layers (Ober &
    Aitchison 2021; gi).

    $U_0$ are the inducing inputs. $A_l$ are the inputs that layer l receives (with a column of ones for its bias) when
    $U_0$ passes through the weights drawn for layers 1 to l - 1. If the prior over a row of `[W b]` is $\mathcal{N}(0, T
    T^\top)$, then

    $$ q(W_l | W_1, \dots, W_{l-1}) = \prod_r \mathcal{N}(w_r;\, \Sigma A_l^\top \Lambda_l v_r,\, \Sigma), \qquad
       \Sigma = ((T T^\top)^{-1} + A_l^\top \Lambda_l A_l)^{-1} $$

    (eq. 11, algorithm 1). A draw runs the network on $U_0$ alone and draws each layer's weights as soon as the layer's
    input is known. The drawn weights are then used for any data. Layers are correlated, and q over all weights is not Gaussian.
    q is the exact posterior of linear regression if the network has one layer, $U_0 = X$, $V = Y$ and $\Lambda = 1 / \text{noise}$.

    Layers may be linear or bilinear layers, convolutions of any kind, or projections of `nn.MultiheadAttention`. The layers must
    keep the examples along their first axis and must not mix examples. Other weights need another posterior, as in
    `{"fc": GlobalInducing(...), "*": MeanField()}` (fac -> gi). The other posteriors draw first. A layer that is called several
    times is drawn at its first call. The pass over the inducing inputs runs in evaluation mode.

    Marginals have no closed form. `mean` and `variance` describe each layer given that the earlier layers equal their means. `kl`
    is an estimate from one draw.

    Stored parameters: `inducing_inputs`, and for each layer `pseudo_outputs` (V) and `log_precision` (the diagonal of $\log
    \Lambda$). All positions of an inducing image share one precision. A full $\Lambda$ is stored as its Cholesky factor.

    Args:
        inputs: Initial inducing inputs $U_0$: M inputs of the network, as a tensor, a tuple of positional inputs or a dict of
            keyword inputs. For standard normal inputs, give only their shape, as a list of integers. If the network starts with a
            linear layer, the number M is enough.
        targets: Initial pseudo-outputs V of the last layer: labels, or standardized targets. By default the last layer starts
            like all other layers.
        precision: Initial diagonal of the precision $\Lambda$. The default is 1 (or `NETWORK_PRECISION` if `init="network"`)
            divided by the layer's number of positions.
        last_precision: Initial diagonal of the precision $\Lambda$ in the last layer. If the targets are data, set
            `last_precision` to N / M divided by the noise variance. Initially, q of the last layer is then close to the layer's
            exact posterior given the earlier layers. If `precision` is also small, q of the earlier layers is initially close to
            the prior.
        covariance: `"diagonal"`, or `"full"` for a $\Lambda$ that correlates the inducing inputs.
        learned: Layers with learned pseudo-outputs: `"all"`, or only the `"last"`. With `"last"`, the other layers are drawn
            from the prior (rand -> gi).
        kl_form: `"closed"` for the KL of each layer given the earlier layers, or `"sampled"` for $\log q - \log p$ at
            the draw. With `"sampled"` the bound has no variance if q is exact.
        init: Initial pseudo-outputs V. With `"random"`, V is standard normal, as in the paper. With `"network"`, V is the output
            of each layer of the given network for the inducing inputs, $V_l = A_l [W_l\ b_l]^\top$. Let n be the number of
            inducing inputs times the number of positions. If n is at least the number of columns of $A_l$, the mean of q is
            initially close to the network's weights.

    Raises:
        ValueError: If an argument is out of range, if inputs are not finite, if the network mixes examples, or if a
            layer is not a linear map.
    """

    name = "global_inducing"
    title, paper = "Global inducing", "Ober & Aitchison 2021"
    cost = "M (d_in + sum of d_out) + M per layer"
    aliases = ("gi",)
    small_options = {"inputs": 20, "init": "network"}
    starts_at_rows = "inputs"
    prior_means = False
    prior_scale = 1.0  # far from inducing points, draws come from the prior, so a wide prior would give large outputs
    runs_network = True
    correlated_priors = True

    @checked
    def __init__(
        self,
        inputs: Any,
        targets: Any = None,
        precision: Positive | None = None,
        covariance: Literal["diagonal", "full"] = "diagonal",
        learned: Literal["all", "last"] = "all",
        kl_form: Literal["closed", "sampled"] = "closed",
        last_precision: Positive | None = None,
        init: Literal["random", "network"] = "random",
    ) -> None:
        super().__init__()
        self.inputs, self.targets, self.precision = check_inputs(inputs), check_targets(targets), precision
        self.covariance, self.learned, self.kl_form = covariance, learned, kl_form
        if init == "network" and learned == "last":
            raise ValueError(
                "GlobalInducing: init='network' starts every layer at the network's outputs, but learned='last' draws "
                "the earlier layers from the prior; use init='random'"
            )
        self.last_precision, self.init = last_precision, init
        self.shares_statistics = self.starts_at_network = init == "network"

    @classmethod
    @checked
    def from_loader(cls, loader: Iterable[Any], points: Count, **options: Any) -> Self:
        """Inducing inputs and targets from the first examples of a loader.

        Args:
            loader: Batches (inputs, targets).
            points: Number of inducing inputs M.
            options: The other arguments of the posterior.

        Raises:
            ValueError: If the loader has fewer than M examples.
        """
        inputs, targets = first_examples(loader, points)
        return cls(inputs, options.pop("targets", targets), **options)

    def config(self) -> dict[str, Any]:
        """The posterior as a plain dict. The dict contains the shapes of the inputs, but no tensors and no targets. The tensors
        are in the state."""
        return {**super().config(), "inputs": describe_inputs(self.inputs), "targets": None}

    @property
    def _bound_runner(self) -> Runner:
        assert self.runner is not None, "bayesianize binds one"
        return self.runner

    # -- making ----------------------------------------------------------------------------------------------------

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Make the parameters. One run of the network on the inducing inputs reveals the order and the inputs of the layers."""
        like = next(iter(values.values()))
        self.types = {
            weight.name: getattr(modules[weight.name], weight.name.rpartition(".")[2]).dtype for weight in self.weights
        }
        if "inducing_inputs" not in self._modules:  # a restart keeps the inducing inputs
            self.inducing_inputs = InducingInputs(self.inputs, self._bound_runner.network, like)
        self._check_network(self._bound_runner.network)
        found = trace(self._bound_runner, self.layers, self.inducing_inputs.arguments(self._type()), values)
        self.maps = {entry.layer.name: entry for entry, _ in found}
        start = [(entry, made) for entry, made in found if self.learned == "all" or entry is found[-1][0]]
        outputs = {
            entry.layer.name: made if self.init == "network" else torch.randn_like(made) for entry, made in start
        }
        if self.targets is not None:
            last, made = found[-1]
            outputs[last.layer.name] = start_outputs(self.targets, last, tuple(made.shape), like)
        self.pseudo_outputs = NamedParameters(outputs)
        size = self.inducing_inputs.num_points
        logs = {}
        for entry, made in start:
            positions = made.numel() // (size * entry.layer.rows)
            usual = (NETWORK_PRECISION if self.init == "network" else 1.0) / positions
            logs[entry.layer.name] = math.log(self.precision or usual)
        if self.last_precision is not None:
            logs[found[-1][0].layer.name] = math.log(self.last_precision)
        if self.covariance == "diagonal":
            self.log_precision = NamedParameters({name: like.new_full((size,), value) for name, value in logs.items()})
        else:
            self.raw_diagonal = NamedParameters(
                {name: like.new_full((size,), raw_positive(math.exp(value / 2))) for name, value in logs.items()}
            )
            self.lower = NamedParameters({name: like.new_zeros(size * (size - 1) // 2) for name in logs})
        self.inputs, self.targets = describe_inputs(self.inputs), None

    def _type(self) -> torch.dtype | None:
        """Dtype of the network's weights if they have low precision, otherwise `None`."""
        low = [dtype for dtype in self.types.values() if dtype == torch.bfloat16]
        return low[0] if low else None

    @staticmethod
    def _check_network(network: nn.Module) -> None:
        for path, module in network.named_modules():
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                raise ValueError(
                    f"GlobalInducing: {path} ({type(module).__name__}) normalizes by batch statistics, so inducing inputs and data "
                    "would affect each other; use GroupNorm, or bayesianize(..., batch_statistics='frozen')"
                )

    # -- drawing ---------------------------------------------------------------------------------------------------

    def draw(self, request: DrawRequest) -> tuple[dict[str, Tensor], Tensor]:
        """Run the network on the inducing inputs, and draw each layer when it is called. All draws run in one batch if `vmap`
        supports the network."""
        runner: Runner = request.runner or self._bound_runner
        self._check_network(runner.network)
        others = self._others(runner, request.weights or {})
        if request.local and any(
            isinstance(value, StructuredWeight) and not value.batchable for value in others.values()
        ):
            raise ValueError(
                "GlobalInducing: another posterior draws noise for each example, but inducing inputs and data need the same "
                "weights; use local_reparameterization=False in the other posterior"
            )
        layers = [entry.layer for entry in self.maps.values()]
        like = next(self.parameters())
        noise = request.normals([layer.numel for layer in layers], like)
        scale = PriorScale(request.prior, self.layers, request.num_draws)
        batched = {
            **{f"noise {layer.name}": part for layer, part in zip(layers, noise, strict=True)},
            **{f"prior {key}": value for key, value in scale.batched.items()},
            **{f"other {key}": value for key, value in others.items()},
        }

        def one(values: dict[str, Tensor], careful: bool = False) -> tuple[dict[str, Tensor], Tensor, Tensor]:
            return self._draw_one(runner, _cut(values, "noise "), scale.at(_cut(values, "prior ")), _cut(values, "other "),
                                  _Pass(careful, request.autocast if request.local else None))  # fmt: skip

        weights, kl, failed = self._run(runner, batched, request.num_draws, one)
        if not should_check(failed):
            return weights, torch.where(failed > 0, torch.nan, kl)
        if bool(failed.any()):
            weights, kl, _ = self._run(
                runner, batched, request.num_draws, lambda values: one(values, careful=True), "loop"
            )
        return weights, kl

    @staticmethod
    def _run(
        runner: Runner, batched: dict[str, Tensor], num_draws: int, one: Callable[[Any], Any], mode: str | None = None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        structured = any(isinstance(value, StructuredWeight) for value in batched.values())
        if (mode or runner.mode(num_draws)) == "vmap" and not structured:
            try:
                run: Callable[..., tuple[dict[str, Tensor], Tensor, Tensor]] = torch.func.vmap(
                    one, randomness="different"
                )
                return runner.decisions().vmaps.run(lambda: run(batched), "inducing inputs")
            except (RuntimeError, SlowVmap) as refusal:
                if isinstance(refusal, torch.OutOfMemoryError):
                    raise
                results = [one(values) for values in each(batched)]  # a caller's mistake gives a readable error here
                runner.refuse_vmap(refusal)
                return _stacked(results)
        return _stacked([one(values) for values in each(batched)])

    def _draw_one(
        self, runner: Runner, noise: dict[str, Tensor], scale: PriorScale, others: dict[str, Tensor], how: _Pass
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        kls: list[Tensor] = []
        failures: list[Tensor] = []

        def step(entry: LinearMap, problem: RegressionFactors | None) -> Tensor:
            eps = noise[entry.layer.name]
            if problem is None:
                return eps.view(1, entry.layer.cols, entry.layer.rows)
            drawn, kl, failed = problem.draw(eps.view(problem.cross.shape), self.kl_form)
            kls.append(kl)
            failures.append(failed.sum() > 0)
            return drawn

        weights = self._walk(runner, others, scale, step, how)
        kl = torch.stack(kls).sum().to(next(iter(noise.values())).dtype)
        failures.append(kl.detach().isfinite().logical_not())  # a factorization does not report infinite values
        return weights, kl, torch.stack(failures).sum()

    def _walk(
        self, runner: Runner, others: Mapping[str, Tensor], scale: PriorScale, step: Step, how: _Pass
    ) -> dict[str, Tensor]:
        """Run the network on the inducing inputs. When a layer is called, `step` makes its whitened weights, [G, D, R]."""
        like, low = next(self.parameters()), self._type()
        device, dtype = like.device.type, like.dtype
        drawn: dict[str, Tensor] = {}
        runner = runner.evaluating() if runner.network.training else runner
        with runner.alone() as own, ExitStack() as hooks:
            network = own.network
            names = [name for weight in self.weights for name in (weight.name, *weight.aliases)]
            slots = {name: owner_of(network, name) for name in names}

            gone = None if network is runner.network else _Gone()

            def empty() -> None:
                for owner, leaf in slots.values():
                    owner._parameters[leaf] = gone  # type: ignore[assignment]

            hooks.callback(empty)

            def put(entry: LinearMap, module: nn.Module, args: Any, kwargs: Any) -> None:
                whitened = step(entry, self._regress(entry, module, entry.seen(module, args, kwargs), scale, how)
                                if entry.layer.name in self.pseudo_outputs else None)  # fmt: skip
                matrix = scale.push(entry.layer, whitened.mT).flatten(-3, -2)  # [rows, D]
                drawn.update(entry.layer.from_matrix(matrix.to(dtype)))
                for weight in entry.layer.weights:
                    value = drawn[weight.name].to(self.types[weight.name]) if low else drawn[weight.name]
                    for name in (weight.name, *weight.aliases):
                        owner, leaf = slots[name]
                        owner._parameters[leaf] = value  # type: ignore[assignment]

            def meet(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
                with torch.autocast(device, enabled=False):
                    for entry in self.maps.values():
                        if entry.hooked == path and entry.layer.weights[0].name not in drawn:
                            put(entry, module, args, kwargs)

            for path in dict.fromkeys(entry.hooked for entry in self.maps.values()):
                hooked = network.get_submodule(path)
                hooks.callback(hooked.register_forward_pre_hook(partial(meet, path), with_kwargs=True).remove)
            with torch.autocast(device, how.autocast, how.autocast is not None, cache_enabled=False):
                own.call(others, *self.inducing_inputs.arguments(low))
        return {name: drawn[name] for name in self.sizes()}

    def _regress(
        self, entry: LinearMap, module: nn.Module, seen: list[Tensor], scale: PriorScale, how: _Pass
    ) -> RegressionFactors:
        r"""The regression that gives a layer's whitened weights. The regression adds the prior's identity matrix to a matrix
        computed from the inducing inputs. In float64, this sum does not lose the identity matrix to rounding.

        On a CPU, computing the matrices of convolutions takes most of the time of a step, so float32 is tried first. We measured
        how float32 rounding changes the variances and those means that are about as large as the prior's standard deviation. Both
        changed by at most about a tenth of

        $$ \epsilon\, [\max_r \max(1, \lVert \tilde m_r \rVert)\, \operatorname{tr} B
           + \max_r (v_r^\top \Lambda v_r \operatorname{tr} B)^{1/2}] $$

        with $\epsilon = 2^{-23}$. If this estimate exceeds `MAX_ROUNDING_ERROR`, float64 is used. Float32 is never used if a
        setting (autocast, TensorFloat-32, bfloat16) would replace it with a lower precision. If the network itself runs in
        bfloat16 on a GPU, features are bfloat16 numbers. Products of two bfloat16 features are exact in float32; see
        `maths.patch_products`.
        """
        name, targets = entry.layer.name, self.pseudo_outputs[entry.layer.name]
        what = f"GlobalInducing: the precision of layer {name or '(the network)'}"

        def problem(dtype: torch.dtype) -> RegressionFactors:
            wide = torch.promote_types(dtype, torch.float32)
            features = [value.to(dtype) for value in seen]
            gram, cross = entry.moments(module, features, targets.to(wide), self._mix(name, wide))
            gram, cross = widened(gram), widened(cross)
            gram = scale.pull(entry.layer, scale.pull(entry.layer, gram).mT)  # T^T A^T Lambda A T
            return RegressionFactors(gram, scale.pull(entry.layer, cross.mT).mT, what if how.careful else None)

        narrow = targets.dtype == torch.float32 and self.covariance == "diagonal"
        if how.autocast is not None and narrow and entry.takes(module, how.autocast):
            return problem(how.autocast)
        if entry.costly and narrow and exact_float32(targets) and should_check(targets):
            found = problem(torch.float32)
            with torch.no_grad():
                trace = found.gram.diagonal(dim1=-2, dim2=-1).sum(-1).max()
                sizes = torch.linalg.vector_norm(targets.flatten(2), dim=-1) if targets.ndim > 2 else targets
                largest = (self._mix(name, sizes.dtype)(sizes)).square().sum(0).max()  # largest v_r^T Lambda v_r
                longest = torch.linalg.vector_norm(found.solve().mean, dim=-2).max().clamp_min(1)
                rounding = torch.finfo(torch.float32).eps * (trace * longest + (trace * largest).sqrt())
            if float(rounding) < MAX_ROUNDING_ERROR:
                return found
        return problem(widened(targets).dtype)

    def _mix(self, layer: str, dtype: torch.dtype) -> HalfPrecision:
        if self.covariance == "diagonal":
            return HalfPrecision(log_diagonal=self.log_precision[layer].to(dtype))
        return HalfPrecision(lower=self.lower[layer].to(dtype), raw_diagonal=self.raw_diagonal[layer].to(dtype))

    def _others(self, runner: Runner, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {weight.name for weight in self.weights}
        missing = [name for name in runner.weights if name not in own and name not in weights]
        if missing:
            raise ValueError(
                f"GlobalInducing: {missing[0]} is not yet drawn when the network runs on the inducing inputs; use one "
                "GlobalInducing for all layers whose draws need the network, and mean_network() if you need the means"
            )
        return {name: value for name, value in weights.items() if name not in own}

    # -- moments ---------------------------------------------------------------------------------------------------

    def mean(self) -> dict[str, Tensor]:
        """Each layer's mean given that the earlier layers equal their means. The marginal mean has no closed form."""
        return self.mean_given({})

    def mean_given(self, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Like `mean`, but the weights of the other posteriors are fixed at the given means."""

        def step(entry: LinearMap, problem: RegressionFactors | None) -> Tensor:
            if problem is None:
                return next(self.parameters()).new_zeros(1, entry.layer.cols, entry.layer.rows)
            return problem.solve().mean

        return self._walk_at_means(others, typical_scale(self), step)

    def _walk_at_means(self, others: Mapping[str, Tensor], scale: PriorScale, step: Step) -> dict[str, Tensor]:
        runner = self._bound_runner
        return self._walk(runner, self._others(runner, others), scale, step, _Pass(careful=True))

    def variance(self) -> dict[str, Tensor]:
        """Each layer's variances given that the earlier layers equal their means. Marginal variances have no closed form."""
        found: dict[str, Tensor] = {}
        scale = typical_scale(self)

        def step(entry: LinearMap, problem: RegressionFactors | None) -> Tensor:
            layer = entry.layer
            if problem is None:
                whole = torch.eye(layer.cols).to(next(self.parameters())).unsqueeze(0)
                mean = whole.new_zeros(1, layer.cols, layer.rows)
            else:
                solved = problem.solve()
                whole, mean = solved.root, solved.mean
            spread = scale.push(layer, whole).square().sum(-2)  # diagonal of T (I + B)^-1 T^T, [G, D]
            rows = spread.unsqueeze(-2).expand(-1, layer.rows // spread.shape[0], -1).flatten(0, 1)
            found.update(layer.from_matrix(rows.to(next(self.parameters()).dtype)))
            return mean

        self._walk_at_means({}, scale, step)
        return {name: found[name] for name in self.sizes()}

    def kl(self, prior: PriorDraw) -> Tensor:
        """KL(q || p) in nats, estimated from one draw."""
        return self.draw(DrawRequest(num_draws=1, prior=prior, runner=self._bound_runner))[1].mean()

    @torch.no_grad()
    def set_to_prior(self, prior: PriorDraw) -> None:
        """Set the pseudo-outputs to 0 and their precision almost to 0."""
        for name in self.pseudo_outputs:
            self.pseudo_outputs[name].zero_()
            if self.covariance == "diagonal":
                self.log_precision[name].fill_(NEGLIGIBLE_LOG_PRECISION)
            else:
                self.raw_diagonal[name].fill_(NEGLIGIBLE_LOG_PRECISION)
                self.lower[name].zero_()


def _cut(values: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _stacked(results: list[tuple[dict[str, Tensor], Tensor, Tensor]]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    if len(results) == 1:
        weights, kl, failed = results[0]
        return {name: value.unsqueeze(0) for name, value in weights.items()}, kl.unsqueeze(0), failed
    found: tuple[dict[str, Tensor], Tensor, Tensor] = pytree.tree_map(stack, *results)
    return found
