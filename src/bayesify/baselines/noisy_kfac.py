"""Noisy K-FAC: trains a matrix normal posterior by natural gradients with Kronecker-factored curvature."""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Count, DataCount, NonNegative, Positive, Probability, checked
from bayesify.baselines.natural_gradient import MAX_GRADIENT_BYTES, Changes, LayerPass, LayerwiseTrainer, Moments
from bayesify.jacobians.rules import Rule, layer_factors
from bayesify.jacobians.trace import Pulled
from bayesify.likelihoods import Categorical, Likelihood
from bayesify.maths.constraints import raw_relative_tril
from bayesify.maths.gamma import as_float, widened
from bayesify.maths.noise import standard_normal
from bayesify.maths.positive_definite import stable_cholesky, stable_eigh
from bayesify.network import BayesianNetwork
from bayesify.posteriors.matrix_normal import MatrixNormal
from bayesify.weights.catalog import Layer, owner_of

Fisher = Literal["sampled", "exact", "empirical"]


class NoisyKFAC(LayerwiseTrainer):
    r"""Noisy natural gradient with a matrix normal posterior (NNG; Zhang et al. 2018, algorithm 2).

    Consider the matrix `[W b]` of a layer. Let $a$ be the layer's inputs (with a 1 appended for the bias), and let $g$ be the
    gradients of $-\log p(y | f)$ at its outputs. The Fisher information is approximated by $A \otimes S$, where A and S are
    moving averages of

    $$ A = \tfrac1B \sum_i \sum_t a_{it} a_{it}^\top, \qquad S = \tfrac{1}{B T} \sum_i \sum_t g_{it} g_{it}^\top $$

    and t runs over the T positions at which the layer is applied (Martens & Grosse 2015; Grosse & Martens 2016 for convolutions).
    With prior precision $\delta$, N examples and $\gamma = \delta / N$, a step is

    $$ M \leftarrow M - \alpha\, S_{\gamma + \eta}^{-1} \Big(\tfrac1B \sum_i \nabla_i + \gamma M\Big) A_{\gamma + \eta}^{-1}, \qquad
       q = \mathcal{MN}\big(M,\ \tfrac1N S_\gamma^{-1},\ A_\gamma^{-1}\big), $$
    $$ A_\gamma = A + \pi \sqrt\gamma\, I, \qquad S_\gamma = S + \tfrac{1}{\pi} \sqrt\gamma\, I, \qquad
       \pi^2 = \frac{\operatorname{tr} A / d_a}{\operatorname{tr} S / d_s}, $$

    where the gradient $\nabla_i$ is taken at a draw from q and averaged with momentum. The extra damping $\eta$ applies only to
    the step of M, not to the covariance of q. The prior's part of the gradient is evaluated at the mean; the paper evaluates it
    at the draw. Both values have the same expectation, but the value at the mean has less noise. At a fixed point of linear
    regression with one layer and noise variance v, M is the exact posterior mean, $A = \frac1N \sum_i a_i a_i^\top$ and $S = I /
    v$. The exact covariance of each output is $(\sum_i a_i a_i^\top / v + \delta I)^{-1}$. The covariance of q differs from the
    exact one only because the prior is split between the two factors; the difference vanishes as $\delta \to 0$.

    Like `VOGN`, this class is a trainer for a Bayesian network, here with `MatrixNormal` posteriors. `VOGN` documents the
    arguments that the two classes share.

        bnn = bayesify.bayesianize(net, posteriors.MatrixNormal(), likelihood=likelihoods.Gaussian(noise=0.1))
        baselines.NoisyKFAC(bnn, learning_rate=0.1).fit(loader, epochs=10)
        bnn.predict(x)

    Args:
        bnn: A network with `MatrixNormal` posteriors over linear and convolution layers, a likelihood and a fixed prior; it is
            changed in place.
        momentum: Decay of the gradient's moving average.
        decay: Decay of the factors' moving averages.
        damping: Extra damping $\eta$.
        fisher: How to obtain the gradients g from which S is computed. With `"sampled"`, the backward pass starts from one random
            vector per example, whose covariance is the likelihood's Fisher information. With `"exact"`, backward passes start
            from the columns of a square root of the Fisher information, one pass per output. `"empirical"` uses the gradients of
            the log-likelihood of the targets, at no extra cost.
        factor_every: Number of steps between observations of A and S.
        inverse_every: Number of steps between factorizations of A and S. Each factorization updates the posterior's covariance.

    Raises:
        TypeError: If `bnn` is not a `BayesianNetwork` with `MatrixNormal` posteriors.
        ValueError: If an argument is out of range, if a weight with a posterior does not belong to a linear or
            convolution layer, or if the prior is hierarchical.
    """

    family = MatrixNormal
    options = ("antithetic", "damping", "fisher", "factor_every", "inverse_every")

    @checked
    def __init__(
        self,
        bnn: BayesianNetwork,
        *,
        num_data: DataCount | None = None,
        learning_rate: Positive = 0.1,
        momentum: Probability = 0.9,
        decay: Probability = 0.95,
        damping: NonNegative = 0.0,
        fisher: Fisher = "sampled",
        factor_every: Count = 1,
        inverse_every: Count = 1,
        num_draws: Count = 1,
        antithetic: bool = False,
        kl_weight: Positive = 1.0,
        point_learning_rate: Positive = 1e-3,
    ) -> None:
        super().__init__(
            bnn,
            num_data=num_data,
            learning_rate=learning_rate,
            momentum=momentum,
            decay=decay,
            damping=damping,
            num_draws=num_draws,
            antithetic=antithetic,
            kl_weight=kl_weight,
            point_learning_rate=point_learning_rate,
        )
        self.fisher, self.factor_every, self.inverse_every = fisher, factor_every, inverse_every
        for _, layer in self._layers():
            self._check_layer(layer)
        self._inverses: dict[str, tuple[Tensor, Tensor]] = {}

    def _layers(self) -> Iterator[tuple[MatrixNormal, Layer]]:
        for part in self.bnn.posteriors:
            assert isinstance(part, MatrixNormal)
            for layer in part.layers:
                yield part, layer

    def _check_layer(self, layer: Layer) -> None:
        module = owner_of(self.bnn.network, layer.weights[0].name)[0]
        plain = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and getattr(module, "groups", 1) == 1
        if not plain or any(weight.aliases for weight in layer.weights):
            raise ValueError(
                f"NoisyKFAC: {layer.weights[0].name} cannot have this posterior, because it is tied to another weight, "
                "or because its layer is neither linear nor a convolution with groups=1; to keep it as a point estimate, select "
                "only other layers, for example {'Linear': MatrixNormal()}"
            )
        if len({self.prior_precision[weight.name] for weight in layer.weights}) > 1:
            raise ValueError(
                f"NoisyKFAC: in {layer.name}, the weight and the bias have different priors, but one damping is used for both; use "
                "the prior Gaussian() or Neal()"
            )

    def rules(self) -> Mapping[str, Rule]:
        """The rules of all layers if this step observes the factors, otherwise no rules."""
        return self._rules if self._observes() else {}

    def _observes(self) -> bool:
        return self.steps % self.factor_every == 0

    @property
    def _observed(self) -> int:
        return -(-self.steps // self.factor_every)

    # -- factors ---------------------------------------------------------------------------------------------------

    def curvature(self, seen: LayerPass, generator: torch.Generator | None, example_weights: Tensor | None) -> Moments:
        """A and S of one draw for each layer name, as weighted sums over examples. A is divided by the mean weight before use."""
        if not self._observes():
            return {}
        inputs: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}
        passes: Iterable[Pulled] = [seen.at_layers]
        if self.fisher != "empirical":
            passes = self._fisher_passes(seen, generator, example_weights)
        for index, pulled in enumerate(passes):
            for _, layer in self._layers():
                path = layer.weights[0].name.rpartition(".")[0]
                calls = pulled.calls(self._rules[path])
                if not calls:
                    raise ValueError(
                        f"NoisyKFAC: the loss does not depend on {path}, or {path} is not called; exclude {path} from "
                        "the posterior"
                    )
                if index == 0:
                    inputs[layer.name] = self._input_factor(layer, path, calls, example_weights)
                found = self._gradient_factor(path, calls)
                gradients[layer.name] = gradients[layer.name] + found if index else found
        return {"inputs": inputs, "gradients": gradients}

    def _fisher_passes(
        self, seen: LayerPass, generator: torch.Generator | None, example_weights: Tensor | None
    ) -> Iterator[Pulled]:
        root = fisher_root(self.likelihood, seen.outputs.detach())  # [B, ..., O, R]
        if example_weights is not None:
            root = root * example_weights.to(root).sqrt().view(-1, *[1] * (root.ndim - 1))
        if self.fisher == "sampled":
            noise = standard_normal(root.shape[:-2].numel() * root.shape[-1], root, generator)
            vectors = (root @ noise.view(*root.shape[:-2], root.shape[-1], 1)).squeeze(-1).unsqueeze(0)
        elif root.ndim > 3:
            raise ValueError("NoisyKFAC: fisher='exact' supports only one prediction per example; use fisher='sampled'")
        else:
            vectors = root.movedim(-1, 0)
        yield from map(seen.pull_vector, vectors)

    def _input_factor(
        self, layer: Layer, path: str, calls: list[tuple[Tensor, Tensor]], example_weights: Tensor | None
    ) -> Tensor:
        def products() -> Iterator[Tensor]:
            for kept, grad in calls:
                examples = grad.shape[1]
                rows = max(1, MAX_GRADIENT_BYTES // (4 * layer.cols * max(1, grad[0, 0].numel() // layer.rows)))
                for start in range(0, examples, rows):
                    part = slice(start, start + rows)
                    a = layer_factors(self._rules[path], kept[part], grad[:, part], layer)[0]  # [b, T, d_a]
                    if example_weights is not None:
                        a = a * example_weights[part].to(a).sqrt().view(-1, 1, 1)
                    a = a.flatten(0, 1)
                    yield a.T @ a / examples

        return reduce(torch.add, products())

    def _gradient_factor(self, path: str, calls: list[tuple[Tensor, Tensor]]) -> Tensor:
        products, positions = [], 0
        for _, grad in calls:
            at_channels = grad[0] if isinstance(self._rules[path].module, nn.Linear) else grad[0].movedim(1, -1)
            flat = as_float(at_channels).reshape(-1, at_channels.shape[-1])
            positions += flat.shape[0] // grad.shape[1]
            products.append(flat.T @ flat / grad.shape[1])
        return reduce(torch.add, products) / positions

    # -- steps -----------------------------------------------------------------------------------------------------

    def update(self, gradient: Mapping[str, Tensor], curvature: Moments, learning_rate: float) -> Changes:
        """Compute a step by the formula in the class's docstring."""
        total, changed = self.effective_data, Changes()
        factorize = (self.steps - 1) % self.inverse_every == 0 or not self._inverses
        for part, layer in self._layers():
            name = layer.name
            if curvature:
                for kind in ("inputs", "gradients"):
                    self.average(kind, name, curvature[kind][name], self.decay, self._observed)
            if factorize:
                changed += self._factorize(part, layer)
            mean = part.mean_value[name]
            prior = self.prior_precision[layer.weights[0].name] / total
            slope = self.average("slope", name, layer.to_matrix(gradient) + prior * mean, self.momentum)
            rows, cols = self._inverses[name]  # lower triangular roots of the inverses
            changed.append((name, mean, mean - learning_rate * (rows @ (rows.T @ slope @ cols) @ cols.T)))
        return changed

    def _factorize(self, part: MatrixNormal, layer: Layer) -> Changes:
        name, total = layer.name, self.effective_data
        correction = 1 - self.decay**self._observed
        inputs, gradients = (self.moments[kind][name] / correction for kind in ("inputs", "gradients"))
        inputs = inputs / max(self.mean_weight, torch.finfo(inputs.dtype).tiny)
        prior = self.prior_precision[layer.weights[0].name] / total
        rows, cols = damped_roots(inputs, gradients, prior)
        inverses = damped_roots(inputs, gradients, prior + self.row_damping) if self.damping else (rows, cols)
        self._inverses = {**self._inverses, name: inverses}
        changed = []
        for kind, lower, raw, value in (
            ("row", part.row_lower, part.row_raw_diagonal, rows / math.sqrt(total)),
            ("column", part.col_lower, part.col_raw_diagonal, cols),
        ):
            pairs = zip((lower[name], raw[name]), raw_relative_tril(value), strict=True)
            changed += [(f"{kind} factor of {name}", *pair) for pair in pairs]
        return changed

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inverses": {name: list(pair) for name, pair in self._inverses.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        device = next(self.bnn.posteriors.parameters()).device
        self._inverses = {name: (rows.to(device), cols.to(device)) for name, (rows, cols) in state["inverses"].items()}


def damped_roots(inputs: Tensor, gradients: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    r"""Lower triangular roots of $S_\gamma^{-1}$ and $A_\gamma^{-1}$ from A, S and $\gamma$; see `NoisyKFAC`."""
    ratio = (inputs.diagonal().mean() / gradients.diagonal().mean().clamp_min(torch.finfo(gradients.dtype).tiny)).sqrt()
    ratio = ratio.clamp(1e-6, 1e6)
    by_cols, by_rows = ratio * math.sqrt(damping), math.sqrt(damping) / ratio
    return inverse_root(gradients, by_rows), inverse_root(inputs, by_cols)


def inverse_root(matrix: Tensor, damping: Tensor) -> Tensor:
    """Lower triangular L with `L L^T = (matrix + damping I)^-1`, from one Cholesky factorization of the flipped matrix."""
    damped = widened(matrix) + torch.diag(widened(damping).expand(len(matrix)))
    upper = stable_cholesky(damped.flip(0, 1), "NoisyKFAC: a damped factor of the Fisher").flip(0, 1)  # damped = U U^T
    identity = torch.eye(len(matrix), dtype=upper.dtype, device=matrix.device)
    inverse: Tensor = torch.linalg.solve_triangular(upper, identity, upper=True)
    return inverse.T.to(matrix.dtype)


def fisher_root(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    r"""A matrix R [..., O, O] for which $R R^\top$ is the likelihood's Fisher information at outputs [..., O].

    For the likelihood `Categorical`, R is $\operatorname{diag}(\sqrt p) - p \sqrt p^\top$. For other likelihoods, R is computed
    from the diagonal or the eigenvalues of the Fisher information.
    """
    outputs = as_float(outputs)
    if isinstance(likelihood, Categorical):
        if likelihood.class_axis not in (-1, outputs.ndim - 1):
            raise ValueError("NoisyKFAC: classes are not on the last axis of the outputs; use fisher='empirical'")
        probs = outputs.softmax(-1)
        return torch.diag_embed(probs.sqrt()) - probs.unsqueeze(-1) * probs.sqrt().unsqueeze(-2)
    fisher = likelihood.fisher(outputs).detach()
    diagonal = fisher.diagonal(dim1=-2, dim2=-1)
    if not torch.equal(fisher, torch.diag_embed(diagonal)):
        values, vectors = stable_eigh(fisher, "NoisyKFAC: the likelihood's Fisher information")
        return vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
    return torch.diag_embed(diagonal.sqrt())
