"""What a loader may yield."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.training.batches import count_examples, parse_batch

X, Y, W = torch.randn(4, 2), torch.arange(4), torch.rand(4)


@dataclass
class Example:
    x: torch.Tensor
    target: torch.Tensor
    weights: torch.Tensor | None = None


Pair = namedtuple("Pair", ["targets", "inputs"])


@pytest.mark.parametrize(
    "item",
    [
        (X, Y),
        [X, Y],
        {"x": X, "y": Y},
        {"inputs": X, "labels": Y},
        Example(X, Y),
        Pair(targets=Y, inputs=X),
        (X.numpy(), Y.numpy()),
    ],
)
def test_forms_of_a_pair(item):
    batch = parse_batch(item)
    assert torch.equal(batch.x, X)
    assert torch.equal(batch.y, Y)
    assert batch.weights is None
    assert len(batch) == 4


@pytest.mark.parametrize("item", [(X, Y, W), {"x": X, "y": Y, "sample_weight": W}, Example(X, Y, W)])
def test_forms_with_example_weights(item):
    assert torch.equal(parse_batch(item).weights, W)


def test_keyword_inputs_stay_together():
    batch = parse_batch({"input_ids": X, "attention_mask": W, "labels": Y})
    assert list(batch.x) == ["input_ids", "attention_mask"]


def test_a_reader_of_the_callers():
    batch = parse_batch({"image": X, "class": Y}, lambda item: (item["image"], item["class"]))
    assert torch.equal(batch.x, X)


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        ((X,), ValueError, "1 entries"),
        ((X, X, Y, W), ValueError, "4 entries"),
        (X, TypeError, r"Tensor.*TensorDataset"),
        ("text", TypeError, "str"),
        ({"x": X, "z": Y}, ValueError, "no target"),
        ({"x": X, "y": Y, "labels": Y}, ValueError, "y and labels"),
        ({"y": Y}, ValueError, "add the inputs"),
        ((X, [0, 1, 2, 3]), TypeError, "list"),
        ((X, torch.tensor(1)), ValueError, r"single number.*DataLoader"),
        ((X[:0], Y[:0]), ValueError, "no examples"),
        ((X, Y, W[:3]), ValueError, r"\(3,\)"),
        ((X, Y, 0.5), TypeError, "float"),
    ],
)
def test_what_is_refused(item, error, message):
    with pytest.raises(error, match=message):
        parse_batch(item)


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


class Sized(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"x": X[index], "y": Y[index]}


def test_count_examples():
    data = TensorDataset(X, Y)
    assert count_examples(DataLoader(data, batch_size=3)) == 4
    assert count_examples(DataLoader(Sized(), batch_size=3)) == 4
    assert count_examples([(X, Y), (X[:3], Y[:3])]) == 7
    assert count_examples(DataLoader(data, sampler=SubsetRandomSampler([0, 2]))) == 2
    with pytest.raises(ValueError, match="give num_data"):
        count_examples(DataLoader(Stream(), batch_size=2))
    with pytest.raises(ValueError, match="no examples"):
        count_examples([])
    with pytest.raises(TypeError, match="can be iterated only once"):
        count_examples(iter([(X, Y)]))


def test_fit_takes_each_of_them_to_the_same_result():
    net = nn.Linear(2, 4)
    batches = [(X, Y), {"x": X, "y": Y}, Example(X, Y), (X.numpy(), np.arange(4)), (X, Y, torch.ones(4))]
    results = []
    for item in batches:
        bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
        bayesify.fit(bnn, [item], epochs=2, seed=0, progress=False)
        results.append(bnn.posterior.mean()["weight"])
    stream = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
    bayesify.fit(stream, DataLoader(Stream(), batch_size=4), num_data=4, epochs=2, seed=0, progress=False)
    results.append(stream.posterior.mean()["weight"])
    assert all(torch.equal(result, results[0]) for result in results)


def test_keyword_inputs_reach_the_network():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 4)

        def forward(self, a, shift):
            return {"logits": self.inner(a) + shift}

    bnn = bayesify.bayesianize(Two(), posteriors.MeanField(), likelihood=likelihoods.Categorical())
    history = bayesify.fit(bnn, [{"a": X, "shift": W[:, None], "labels": Y}], epochs=1, seed=0, progress=False)
    assert len(history) == 1


@pytest.mark.parametrize("labels", [("cat", "dog", "cat", "cat"), ["cat", "dog", "cat", "cat"]])
def test_labels_that_are_texts_must_be_numbered(labels):
    with pytest.raises(TypeError, match="give a tensor with one row per example; for labels that are texts, number"):
        parse_batch((X, labels))
    with pytest.raises(TypeError, match=r"give a tensor with one row per example$"):
        parse_batch((X, [0, 1, 0, 0]))
