"""IVON: mean-field variational inference by natural gradients. A step costs about as much as a step of Adam."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from bayesify.arguments.checks import Count, DataCount, Positive, Probability, checked
from bayesify.baselines.natural_gradient import FIT_OPTIONS, NaturalGradient, TrainerUpdate
from bayesify.maths.value_checks import find_not_finite
from bayesify.network import BayesianNetwork
from bayesify.posteriors.mean_field import MeanField
from bayesify.predictor import Batch
from bayesify.training.arguments import Steps
from bayesify.training.batches import count_batches
from bayesify.training.schedules import make_optimizer


class IVON(NaturalGradient):
    r"""Improved variational online Newton (Shen et al. 2024, algorithm 1).

    Let $\hat g$ be the gradient of the mean negative log-likelihood per example at a draw $\theta \sim q$. Let $\lambda$ be the
    number of examples divided by the KL's weight, and let $\delta$ be the prior precision divided by $\lambda$. The variances of
    q are $\sigma^2 = 1 / (\lambda (h + \delta))$. A step is

    $$ \hat h = \hat g\, \frac{\theta - m}{\sigma^2}, \qquad
       h \leftarrow h + (1 - \beta_2)(\hat h - h) + \tfrac12 (1 - \beta_2)^2 \frac{(\hat h - h)^2}{h + \delta}, $$
    $$ g \leftarrow \beta_1 g + (1 - \beta_1) \hat g, \qquad
       m \leftarrow m - \alpha \frac{g / (1 - \beta_1^t) + \delta m}{h + \delta}. $$

    The reparameterization trick makes $\hat h$ an estimate of the Hessian's diagonal, averaged over q. The last term in the
    update of h keeps $h + \delta$ positive. At a fixed point of these steps, the gradient of the bound `bnn.elbo` with respect to
    the means and standard deviations is 0. For linear regression with known noise, m is then the exact posterior mean, and $1 /
    \sigma^2$ is the diagonal of the exact precision.

    A step needs one ordinary gradient of the bound. The gradient's component for $\log \sigma$ is $G = \sigma^2 (\hat h - h)$,
    so $h + \delta$ is multiplied by $1 + a + a^2 / 2$ with $a = (1 - \beta_2) \lambda G$. Per-example gradients are not needed,
    so every layer is supported, including BatchNorm in training mode. If a step uses several draws, their gradients are averaged.
    `fit` supports bfloat16 autocast, accumulated batches, several devices, and captured steps on a GPU.

    Like `VOGN`, this class is a trainer for a network with a `MeanField` posterior:

        bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
        baselines.IVON(bnn, init_curvature=0.9).fit(loader, epochs=200, schedule=schedules.cosine, precision="bf16")
        bnn.predict(x)

    The paper trains ResNets on CIFAR from scratch with $\alpha = 0.2$, $\beta_1 = 0.9$, $\beta_2 = 1 - 10^{-5}$,
    $\delta = 2 \cdot 10^{-4}$ (`prior=Gaussian((N * 2e-4) ** -0.5)`), and an initial h of 0.9 or 0.5. After a warm-up, $\alpha$
    follows a cosine schedule. The paper's learning rates are $\alpha$ times the initial $h + \delta$; here the learning rate is
    $\alpha$ itself.

    Args:
        bnn: A network with a `MeanField` posterior, a likelihood and a fixed prior; it is changed in place.
        num_data: Number of examples N; by default `fit` counts them.
        learning_rate: Learning rate $\alpha$; 1 would be a full Newton step.
        momentum: Decay $\beta_1$ of the gradient's moving average.
        decay: Decay $\beta_2$ of the curvature's moving average. The standard deviations follow the curvature of the last
            $1 / (1 - \beta_2)$ steps. To start from a trained network, use 1 - 3 / steps, where steps is the number of steps of
            the run. The curvature's average then covers a third of the run. With this decay, the standard deviation of a weight
            that does not affect the loss grows by a factor of 4.5 over the run.
        init_curvature: Initial h, the same for all weights. By default, the posterior's initial standard deviations are kept,
            which suits a trained network.
        clip: Upper bound on the absolute value of each entry of $(g + \delta m) / (h + \delta)$; by default there is no bound.
        num_draws: Number of draws of the weights per step.
        kl_weight: Factor on the KL. In the formula of a step, $\lambda$ is N divided by this factor.
        point_learning_rate: Learning rate of Adam for all parameters that have no posterior.

    Raises:
        TypeError: If `bnn` is not a `BayesianNetwork` with a `MeanField` posterior.
        ValueError: If an argument is out of range, the posterior is pruned or has a `max_std`, or the prior is hierarchical.
    """

    family = MeanField
    options = ("init_curvature", "clip")
    fit_options = FIT_OPTIONS | {"average", "precision", "steps"}

    @checked
    def __init__(
        self,
        bnn: BayesianNetwork,
        *,
        num_data: DataCount | None = None,
        learning_rate: Positive = 0.2,
        momentum: Probability = 0.9,
        decay: Probability = 1 - 1e-5,
        init_curvature: Positive | None = None,
        clip: Positive | None = None,
        num_draws: Count = 1,
        kl_weight: Positive = 1.0,
        point_learning_rate: Positive = 1e-3,
    ) -> None:
        super().__init__(bnn, num_data, learning_rate, momentum, decay, num_draws, kl_weight, point_learning_rate)
        self.init_curvature, self.clip = init_curvature, clip
        parts = [part for part in bnn.posteriors if isinstance(part, MeanField)]
        self._pairs = {name: (mean, part.raw_std[name]) for part in parts for name, mean in part.mean_value.items()}
        precisions = [self.prior_precision[name] for name in self._pairs]
        chosen = {"lr": learning_rate, "betas": (momentum, decay), "clip": clip}
        points = make_optimizer(None, nn.ParameterList(self._points), point_learning_rate) if self._points else None
        self.optimizer = CurvatureDescent(list(self._pairs.values()), precisions, points, **chosen)

    def _step(self, batch: Batch, generator: torch.Generator | None, learning_rate: float | None) -> float:
        self._begin()
        assert self.num_data is not None
        options: dict[str, Any] = {"num_draws": self.num_draws, "generator": generator}
        data, kl = self.bnn.terms(batch, phase="variational", num_data=self.num_data, **options)
        loss = (self.kl_weight * kl.mean() - data.mean()) / self.num_data
        named = {f"mean of {name}": mean for name, (mean, _) in self._pairs.items()}
        named |= {f"scale of {name}": log_std for name, (_, log_std) in self._pairs.items()}
        named |= {f"point estimate {index + 1}": point for index, point in enumerate(self._points)}
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        found = [(name, grad) for name, grad in zip(named, grads, strict=True) if grad is not None]
        if (odd := find_not_finite(found)) is not None:
            why = f"the gradient of {odd} is not finite, so the step was not taken"
            raise ValueError(f"IVON: {why}; lower the learning rate")
        for parameter, grad in zip(named.values(), grads, strict=True):
            parameter.grad = grad
        group, rate = self.optimizer.param_groups[0], self.optimizer.param_groups[0]["lr"]
        group["lr"] = rate if learning_rate is None else learning_rate
        self.optimizer.step()
        group["lr"] = rate
        self.optimizer.zero_grad()
        return -float(data.detach().mean()) / self.num_data

    @torch.no_grad()
    def _begin(self) -> None:
        """Pass N to the optimizer. Before the first step, set the standard deviations from `init_curvature` if it is given."""
        self.optimizer.effective_data = total = self.effective_data
        if self.init_curvature is not None and not self.optimizer.state:
            for name, (_, log_std) in self._pairs.items():
                log_std.fill_(-0.5 * math.log(total * self.init_curvature + self.prior_precision[name]))

    def arguments_of_fit(self, loader: Iterable[Any], update: TrainerUpdate, options: dict[str, Any]) -> dict[str, Any]:
        """See `NaturalGradient`. `fit` uses this trainer's optimizer, whose learning rates follow the schedule in every step."""
        self._begin()
        steps, draws = options.get("steps", Steps()), {"num_draws": self.num_draws, "kl_weight": self.kl_weight}
        given = {"update": update, "optimizer": self.optimizer, **draws}
        if update.schedule is not None:
            batches = count_batches(loader)
            if batches is None:
                raise ValueError(
                    "IVON.fit: the loader has no length, but schedule= needs the number of steps; give a loader with "
                    "a length, or leave schedule= out"
                )
            total, schedule = update.epochs * -(-batches // steps.accumulate), update.schedule
            for group in self.optimizer.param_groups:
                group["lr"] = group.pop("initial_lr", group["lr"])  # undo the schedule of an earlier run
            given["scheduler"] = LambdaLR(self.optimizer, lambda step: schedule(min(1.0, step / total)))
            given["steps"] = replace(steps, scheduler="step")
        return options | given

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state))


class CurvatureDescent(torch.optim.Optimizer):
    r"""Optimizer that takes `IVON`'s steps from gradients of the negative bound per example, and Adam's steps of point estimates.

    All state is in tensors on the parameters' device, and steps do not synchronize with the host, so that they can be captured
    in a CUDA graph. If `fit` sets `found_inf`, a step changes nothing. `pairs` are means and log standard deviations,
    `points` is the optimizer of the point estimates, and `effective_data` is N divided by the KL's weight.
    """

    _step_supports_amp_scaling = True  # tells the guard of `fit` that this optimizer respects `found_inf`

    def __init__(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        prior_precisions: Sequence[float],
        points: torch.optim.Optimizer | None,
        **defaults: Any,
    ) -> None:
        means, log_stds = zip(*pairs, strict=True)
        super().__init__([*means, *log_stds], defaults)
        self.prior_precisions, self.effective_data = prior_precisions, 1.0
        self.points = points
        if points is not None:
            self.param_groups += points.param_groups
        self._share()

    def _share(self) -> None:
        """Let the optimizer of the point estimates use this object's state, so that checkpoints and schedulers cover both."""
        if self.points is not None:
            self.points.param_groups, self.points.state = self.param_groups[1:], self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        super().load_state_dict(state_dict)
        for parameter in self.param_groups[0]["params"]:
            if parameter in self.state:  # torch leaves the step count on the device from which it was stored
                self.state[parameter]["step"] = self.state[parameter]["step"].to(parameter)
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step from the gradients, with torch's `foreach` kernels."""
        found: Tensor | None = getattr(self, "found_inf", None)
        if self.points is not None:
            if found is not None:
                self.points.found_inf = found  # type: ignore[attr-defined]
            try:
                self.points.step()
            finally:
                vars(self.points).pop("found_inf", None)  # the flag belongs to a single step
        group, count = self.param_groups[0], len(self.prior_precisions)
        triples = zip(group["params"][:count], group["params"][count:], self.prior_precisions, strict=True)
        used = [triple for triple in triples if triple[0].grad is not None and triple[1].grad is not None]
        if used:
            means, log_stds, precisions = (list(part) for part in zip(*used, strict=True))
            self._step(means, log_stds, [value / self.effective_data for value in precisions], found)

    def _step(self, means: list[Tensor], log_stds: list[Tensor], decays: list[float], found: Tensor | None) -> None:
        """Apply the update formula of `IVON`; `decays` contains the value of delta for each weight."""
        group = self.param_groups[0]
        (momentum, decay), total, rate = group["betas"], self.effective_data, group["lr"]
        for mean in means:
            if not self.state[mean]:
                self.state[mean] = {"step": mean.new_zeros(()), "momentum": torch.zeros_like(mean)}
        averages, steps = ([self.state[mean][key] for mean in means] for key in ("momentum", "step"))
        given = [value.grad for value in (*means, *log_stds) if value.grad is not None]
        gradients = list(torch._foreach_add(given[: len(means)], torch._foreach_mul(means, decays), alpha=-1))
        growth = list(torch._foreach_mul(given[len(means) :], (1 - decay) * total))  # a
        if found is not None:  # if set: keep the averages, do not grow, and use a rate of 0
            bad = found > 0
            gradients = [torch.where(bad, *pair) for pair in zip(averages, gradients, strict=True)]
            growth = [torch.where(bad, 0.0, value) for value in growth]
            rate = rate * ~bad
        torch._foreach_add_(steps, [torch.ones_like(steps[0]) if found is None else (~bad).to(steps[0])] * len(steps))
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        factor = torch._foreach_mul(growth, 0.5)
        torch._foreach_add_(factor, 1.0)
        torch._foreach_mul_(factor, growth)
        torch._foreach_log1p_(factor)  # log(1 + a + a^2 / 2)
        torch._foreach_sub_(log_stds, factor, alpha=0.5)
        variances = torch._foreach_mul(log_stds, 2.0)
        torch._foreach_exp_(variances)
        torch._foreach_mul_(variances, total)  # 1 / (h + delta)
        ways = torch._foreach_mul(averages, 1 / (1 - momentum ** steps[0].clamp(min=1.0)))
        torch._foreach_add_(ways, torch._foreach_mul(means, decays))
        torch._foreach_mul_(ways, variances)
        if group["clip"] is not None:
            torch._foreach_clamp_min_(ways, -group["clip"])
            torch._foreach_clamp_max_(ways, group["clip"])
        torch._foreach_mul_(ways, rate)
        torch._foreach_sub_(means, ways)
