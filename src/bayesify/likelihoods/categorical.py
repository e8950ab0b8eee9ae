"""Class labels: yes or no, or one of several classes."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.arguments.checks import Axis, Index, checked
from bayesify.likelihoods.base import Likelihood, random_signs, spread_factor
from bayesify.maths.gamma import as_float
from bayesify.maths.value_checks import should_check, transforming
from bayesify.predictive import ClassificationPredictive, Outputs
from bayesify.predictive.gaussian import GaussianClassPredictive, Link, OutputGaussian


class Bernoulli(Likelihood):
    r"""A binary label for each of one or several outputs: $p(y = 1 | f) = \operatorname{sigmoid}(f)$.

    The Fisher matrix is $\operatorname{diag}(p (1 - p))$. Targets are 0 or 1 and have the outputs' shape; a last axis
    of length 1 may be missing from the targets or from the outputs.
    """

    name = "bernoulli"
    task = "classification"

    def check_values(self, outputs: Tensor, y: Tensor) -> None:
        """Raise `ValueError` unless every target is 0 or 1."""
        wrong = (y != 0) & (y != 1)
        if bool(wrong.any()):
            raise ValueError(f"likelihoods.Bernoulli: a target is {y[wrong][0].item()}; give targets that are 0 or 1")

    def log_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.logsigmoid(torch.where(y.bool(), outputs, -outputs))

    def predictive(self, outputs: Outputs) -> ClassificationPredictive:
        """A mixture of the draws' probabilities."""
        return ClassificationPredictive(outputs, _binary_log_probs, binary=True)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> ClassificationPredictive:
        return GaussianClassPredictive(outputs, None, link)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`diag(p (1 - p))`."""
        probs = as_float(outputs).sigmoid()
        return torch.diag_embed(probs * (1 - probs))


def _binary_log_probs(outputs: Tensor) -> Tensor:
    outputs = as_float(outputs)
    return torch.stack((F.logsigmoid(-outputs), F.logsigmoid(outputs)), dim=-1)


class Categorical(Likelihood):
    r"""One of C classes: $p(y = c | f) = \operatorname{softmax}(f)_c$.

    The Fisher matrix is $\operatorname{diag}(p) - p p^\top$. Outputs are [B, ..., C], and targets are integers [B, ...].

    Args:
        class_axis: Axis of the classes in outputs [B, ...] without an axis of draws. Use 1 for image segmentation in torch's
            order [B, C, H, W].
        ignore_index: A label that means "no label here" and contributes nothing.

    Raises:
        ValueError: If `class_axis` is 0, because axis 0 holds the examples.
    """

    name = "categorical"
    task = "classification"

    @checked
    def __init__(self, class_axis: Axis = -1, ignore_index: Index = -100) -> None:
        super().__init__()
        if class_axis == 0:
            found = "class_axis=0 is the axis of the examples"
            raise ValueError(f"likelihoods.Categorical: {found}; give the axis of the classes")
        self._class_axis, self._ignore_index = class_axis, ignore_index

    @property
    def class_axis(self) -> int:
        """Axis of the outputs that holds the classes."""
        return self._class_axis

    @property
    def _axis(self) -> int:
        return self._class_axis if self._class_axis < 0 else self._class_axis + 1

    def _classes_last(self, outputs: Tensor) -> Tensor:
        return outputs if self._class_axis == -1 else outputs.movedim(self._axis, -1)

    def _is_labeled(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Whether each target is a label and not `ignore_index`. `outputs` are the outputs of one draw."""
        return self._fit_targets(outputs, y, False)[0] != self._ignore_index

    def _all_count(self, y: Tensor, classes: int) -> bool:
        """Whether every label is known to be in range and not ignored; false on a GPU, where the check would have to wait."""
        if y.device.type != "cpu" or not should_check(y) or not y.numel() or y.is_floating_point():
            return False
        low, high = map(int, y.aminmax())
        return low >= 0 and high < classes and not low <= self._ignore_index <= high

    shape_remedy = (
        "give one integer label per example (y.argmax(-1) for one-hot rows), or give the classes' axis as class_axis"
    )
    least_dims = 2

    def target_shape(self, outputs: Tensor) -> tuple[int, ...]:
        """The shape of the outputs without the axis of classes."""
        if outputs.ndim < 2:
            raise ValueError(
                f"likelihoods.Categorical: outputs of shape {tuple(outputs.shape)} have no axis of classes; "
                "give the network one output per class, or use Bernoulli for two classes"
            )
        return tuple(outputs.movedim(self._class_axis, -1).shape[:-1])

    def check_values(self, outputs: Tensor, y: Tensor) -> None:
        """Raise `ValueError` unless every label is an integer in 0..C-1."""
        if y.is_floating_point() or y.is_complex():
            raise ValueError(
                f"likelihoods.Categorical: targets have type {y.dtype}, but labels must be integers; give y.long(), use Bernoulli "
                "for targets that are 0 or 1, or use Gaussian for targets that are amounts"
            )
        classes = self._classes_last(outputs).shape[-1]
        if self._all_count(y, classes):
            return
        wrong = ((y < 0) | (y >= classes)) & (y != self._ignore_index)
        if bool(wrong.any()):
            hint = "; with one output for two classes, use Bernoulli" if classes == 1 else ""
            found = f"label {y[wrong][0].item()} is out of range for {classes} outputs"
            raise ValueError(f"likelihoods.Categorical: {found}; labels go from 0 to {classes - 1}{hint}")

    def log_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        logits = self._classes_last(outputs)
        if self._all_count(y, logits.shape[-1]):
            each = y.long().expand(logits.shape[:-1])
            return F.log_softmax(logits, dim=-1).gather(-1, each.unsqueeze(-1)).squeeze(-1)
        ignored = y == self._ignore_index
        labels = y.masked_fill(ignored, 0).long()
        each = (inside := labels.clamp(0, logits.shape[-1] - 1)).expand(logits.shape[:-1])
        if logits.is_cuda and not transforming():  # a matrix with one label per row has the fastest kernels
            found = -F.cross_entropy(logits.flatten(0, -2), each.flatten(), reduction="none").view(each.shape)
        else:
            found = F.log_softmax(logits, dim=-1).gather(-1, each.unsqueeze(-1)).squeeze(-1)
        # An unchecked label that is out of range gives NaN instead of crashing the device.
        return found.masked_fill(ignored, 0.0) * torch.where(labels == inside, 1.0, torch.nan)

    def predictive(self, outputs: Outputs) -> ClassificationPredictive:
        """A mixture of the draws' class probabilities."""
        log_probs = partial(_class_log_probs, axis=self._axis)
        return ClassificationPredictive(outputs, log_probs, ignore_index=self._ignore_index)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> ClassificationPredictive:
        axis = self.logit_axis(outputs.mean.ndim)
        return GaussianClassPredictive(outputs, axis, link, ignore_index=self._ignore_index)

    def logit_axis(self, ndim: int) -> int:
        """The axis of the classes, counted from the end."""
        return self._class_axis if self._class_axis < 0 else self._class_axis - ndim

    def fisher(self, outputs: Tensor) -> Tensor:
        """`diag(p) - p p^T` over the last axis."""
        probs = as_float(outputs).softmax(-1)
        return torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)

    def fisher_factor(self, outputs: Tensor, y: Tensor | None = None) -> Tensor:
        r"""C - 1 vectors whose outer products add up to $\operatorname{diag}(p) - p p^\top$: [K, B, ...].

        With the unit vector $s = \sqrt p$, the Fisher matrix is $\operatorname{diag}(s)\,Q Q^\top \operatorname{diag}(s)$, where
        Q is an orthonormal basis of the space orthogonal to s. The columns of Q are all but the first column of the Householder
        reflection that maps s to the first axis.
        """
        last = self._classes_last(as_float(outputs).unsqueeze(0))[0]
        factor = self._factor(last)  # [B, ..., K, C]
        if y is not None:
            factor = factor * self._is_labeled(outputs, y)[..., None, None]
        return spread_factor(factor).movedim(-1, self._axis)

    def fisher_parts(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The pair (h, q), in which both tensors are the class probabilities. They are 0 for targets without a label."""
        probs = as_float(outputs).softmax(self.logit_axis(outputs.ndim))
        if y is not None:
            probs = probs * self._is_labeled(outputs, y).unsqueeze(self.logit_axis(outputs.ndim))
        return probs, probs

    def fisher_samples(
        self, outputs: Tensor, count: int, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        r"""Vectors $\sqrt{w_c} (e_c - p)$ with $\mathbb{E} \sum_c w_c (e_c - p)(e_c - p)^\top = \operatorname{diag}(p) - p p^\top$.

        Each class is chosen at most once. Its chance is proportional to $p_c$, but at most 1. The most likely classes
        are chosen with certainty and have weight $p_c$. The other classes are chosen by systematic sampling, in equal
        steps through the remaining probability, and have equal weights. If fewer than `count` classes have nonzero probability,
        the choice is not random.
        """
        probs = self._classes_last(as_float(outputs).unsqueeze(0))[0].softmax(-1)  # [B, ..., C]
        if probs.flatten(1).shape[1] - math.prod(probs.shape[1:-1]) <= count:
            return self.fisher_factor(outputs, y)
        classes, weight = _proportional_sample(probs, min(count, probs.shape[-1]), generator)  # [B, ..., K]
        weight = weight.sqrt()
        if probs.ndim > 2:  # with random signs, products of different positions have expectation 0
            weight = weight * random_signs(weight.shape, weight, generator)
        if y is not None:
            weight = weight * self._is_labeled(outputs, y).unsqueeze(-1)
        found = -weight.unsqueeze(-1) * probs.unsqueeze(-2)
        found = found.scatter_add(-1, classes.unsqueeze(-1), weight.unsqueeze(-1)).movedim(-2, 0)  # [K, B, ..., C]
        return found.movedim(-1, self._axis)

    def _factor(self, outputs: Tensor) -> Tensor:
        root = outputs.softmax(-1).sqrt()  # [..., C], a unit vector
        normal = root.clone()
        normal[..., 0] += 1.0  # the root is positive, so the sum cannot cancel
        scale = 2 / normal.square().sum(-1)
        eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        basis = eye[1:] - (scale.unsqueeze(-1) * normal[..., 1:]).unsqueeze(-1) * normal.unsqueeze(-2)
        return basis * root.unsqueeze(-2)


def _proportional_sample(probs: Tensor, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    r"""Choose K classes with weights w, [..., K], so that $\mathbb{E} \sum_c w_c f(c) = \sum_c p_c f(c)$ for every f.

    Classes are considered in order of decreasing probability. For each class, the quotient is the total probability of this and
    all later classes, divided by the number of classes still to choose. The class is chosen with certainty if its probability
    exceeds the quotient. From the first class whose probability does not exceed its quotient, classes are chosen by systematic
    sampling (Madow 1949), in steps of this quotient from a random point of the cumulative probability.
    """
    ordered, classes = probs.sort(-1, descending=True)
    # Sum from the least likely class, because 1 minus the sum of the others would be rounding error.
    tails = ordered.flip(-1).cumsum(-1)
    place = torch.arange(count, device=probs.device)
    left = tails.flip(-1)[..., :count]  # [..., K]: total probability of each place and all later places
    shares = left / (count - place)
    certain = (ordered[..., :count] > shares).long().cumprod(-1).sum(-1, keepdim=True).clamp_max(count - 1)  # n
    share = shares.gather(-1, certain)
    start = torch.rand(share.shape, dtype=probs.dtype, device=probs.device, generator=generator)
    after = (count - place - start) * share  # probability left after each step
    met = probs.shape[-1] - 1 - torch.searchsorted(tails, after.contiguous(), right=True).clamp_max(probs.shape[-1] - 1)
    index = torch.where(place < certain, place, met)
    return classes.gather(-1, index), torch.where(place < certain, ordered[..., :count], share)


def _class_log_probs(outputs: Tensor, axis: int) -> Tensor:
    logits = as_float(outputs).movedim(axis, -1)
    if logits.stride(-1) != 1 and logits.mT.is_contiguous():  # working along the contiguous axis takes half the time
        return F.log_softmax(logits.mT, dim=-2).mT
    return F.log_softmax(logits, dim=-1)
