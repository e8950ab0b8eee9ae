"""VOGN: mean-field variational inference by natural gradients. Squared per-example gradients serve as the curvature."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from bayesify.baselines.natural_gradient import MAX_GRADIENT_BYTES, Changes, LayerPass, LayerwiseTrainer, Moments
from bayesify.jacobians.trace import Use
from bayesify.maths.gamma import as_float
from bayesify.posteriors.mean_field import MeanField


class VOGN(LayerwiseTrainer):
    r"""Variational online Gauss-Newton (Khan et al. 2018, algorithm 2; Osawa et al. 2019, algorithm 1).

    With $g_i = -\nabla_w \log p(y_i | f_w(x_i))$ at a draw $w \sim q$, prior precision $\delta$ and N examples, a step is

    $$ s \leftarrow \beta_2 s + (1 - \beta_2) \tfrac1B \sum_i g_i^2, \qquad
       u \leftarrow \beta_1 u + (1 - \beta_1) \big(\tfrac1B \sum_i g_i + \tfrac{\delta}{N} m\big), $$
    $$ m \leftarrow m - \alpha\, \frac{u}{s + \delta/N + \gamma}, \qquad
       q(w) = \mathcal{N}\Big(m, \operatorname{diag}\frac{1}{N (s + \delta/N + \gamma)}\Big), $$

    where both averages have Adam's bias correction. At a fixed point, the gradient of the bound with respect to the mean is 0,
    and the precision of each weight is $\delta + \sum_i \mathbb{E}_q g_i^2$ (if $\gamma = 0$). The squared gradients are used
    instead of the Gauss-Newton diagonal. The squared gradients equal this diagonal in expectation if the targets follow the
    likelihood. For linear regression with noise variance v, the mean of q is the exact posterior mean, and
    $\mathbb{E}_q g_{ij}^2 = x_{ij}^2 (r_i^2 + x_i^\top \Sigma x_i) / v^2$, where $r_i$ are the residuals at this mean and
    $\Sigma$ is the covariance of q.

    This class trains a network with a `MeanField` posterior and is used like an optimizer. The trained network is an ordinary
    Bayesian network:

        bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
        baselines.VOGN(bnn, learning_rate=0.1).fit(loader, epochs=10)
        bnn.predict(x)

    For linear, convolution and embedding layers, squared per-example gradients are computed from products of inputs and output
    gradients. For other weights (attention, recurrent and tied weights, custom parameters), squared gradients need one pass per
    example, which does not work with BatchNorm in training mode. If BatchNorm couples the examples of a batch, an example's
    gradient includes only the part that flows through the example's own activations.

    Args:
        bnn: A network with a `MeanField` posterior, a likelihood and a fixed prior; it is changed in place.
        num_data: Number of examples N; by default `fit` counts them.
        learning_rate: Learning rate $\alpha$; 1 would be a full Newton step.
        momentum: Decay $\beta_1$ of the gradient's moving average.
        decay: Decay $\beta_2$ of the curvature's moving average.
        damping: Damping $\gamma$, which makes steps shorter and the posterior narrower.
        num_draws: Number of draws of the weights per step.
        antithetic: Whether draws come in pairs of opposite noise.
        kl_weight: Factor on the KL. In the formula of a step, N is divided by this factor.
        point_learning_rate: Learning rate of Adam for all parameters that have no posterior.

    Raises:
        TypeError: If `bnn` is not a `BayesianNetwork` with a `MeanField` posterior.
        ValueError: If an argument is out of range, the posterior is pruned or has a `max_std`, or the prior is hierarchical.
    """

    family = MeanField

    def curvature(self, seen: LayerPass, generator: torch.Generator | None, example_weights: Tensor | None) -> Moments:
        """For each weight name, the weighted mean of squared gradients over examples."""
        batch = len(seen.at_outputs)
        second_moments: dict[str, Tensor] = {}
        general = []
        for name, value in seen.weights.items():
            path, _, leaf = name.rpartition(".")
            own = [Use(self._rules[path], leaf)] if path in self._rules and not self.bnn.weights[name].aliases else []
            if name not in seen.used:
                second_moments[name] = torch.zeros_like(as_float(value.detach()))
                continue
            found = seen.at_layers.sum_of_squares(own, value.numel(), MAX_GRADIENT_BYTES)
            if found is None:  # the layer has no rule, or its weights are used without calling the layer
                general.append(name)
            else:
                second_moments[name] = found.view(value.shape) / batch
        if general:
            self._check_uncoupled(general[0])
            second_moments |= {name: value / batch for name, value in seen.general_squares(general).items()}
        return {"second_moments": second_moments}

    def _check_uncoupled(self, name: str) -> None:
        for module in self.bnn.network.modules():
            if isinstance(module, _BatchNorm) and module.training:
                raise ValueError(
                    f"VOGN: {name} needs per-example gradients, but BatchNorm in training mode couples the "
                    f"examples; exclude {name} from the posterior (with a selector such as 'Linear'), or put BatchNorm "
                    "into eval mode"
                )

    def update(self, gradient: Mapping[str, Tensor], curvature: Moments, learning_rate: float) -> Changes:
        """Compute a step by the formula in the class's docstring."""
        total, changed = self.effective_data, []
        for part in self.bnn.posteriors:
            assert isinstance(part, MeanField)
            for name, mean in part.mean_value.items():
                prior = self.prior_precision[name] / total
                slope = self.average("gradient", name, gradient[name] + prior * mean, self.momentum)
                second_moments = self.average("second_moments", name, curvature["second_moments"][name], self.decay)
                precision = second_moments + (prior + self.row_damping)
                changed.append((name, mean, mean - learning_rate * slope / precision))
                changed.append((f"scale of {name}", part.raw_std[name], -0.5 * (total * precision).log()))
        return changed
