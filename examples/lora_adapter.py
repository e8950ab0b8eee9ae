# %% [markdown]
# # A Bayesian LoRA adapter
#
# A low-rank adapter that is trained on few examples is overconfident on new examples.
# `bayesianize_lora` puts a posterior over the adapter's matrices A and B. The base
# model does not change. `bayesianize_lora` finds the matrices by their names, `lora_A`
# and `lora_B`. The function works with adapters of
# [peft](https://huggingface.co/docs/peft) and with your own. This notebook defines its
# own adapter. The base model is a small transformer that reads scikit-learn's digits
# row by row, so nothing has to be downloaded.

# %%
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import metrics
from bayesify.adapters import bayesianize_lora

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = (
    torch.tensor(images).float().reshape(-1, 8, 8) / 8 - 1
)  # eight tokens of eight pixels
y = torch.tensor(labels)


class Reader(nn.Module):
    """Rows of an image [B, 8, 8] to logits of five classes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(0.1 * torch.randn(8, width))
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place
        h = h + nn.functional.scaled_dot_product_attention(
            self.query(h), self.key(h), self.value(h)
        )
        h = h + self.down(torch.relu(self.up(h)))
        return self.head(h.mean(-2))


# %% [markdown]
# ## The base model
#
# The base model learns the digits 0 to 4. Then the weights of the base model are
# frozen.

# %%
base, known = Reader(), y < 5
optimizer = torch.optim.Adam(base.parameters(), lr=3e-3)
loader = DataLoader(TensorDataset(x[known], y[known]), batch_size=50, shuffle=True)
for _ in range(20):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(base(inputs), targets).backward()
        optimizer.step()
base.requires_grad_(False)

# %% [markdown]
# ## A plain adapter
#
# The adapter has low-rank updates of four linear maps. The adapter learns the digits 5
# to 9 from 60 labeled images.


# %%
class LowRank(nn.Module):
    """W x + B A x: the map that is given stays as it is."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen
        self.lora_A = nn.Linear(frozen.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.lora_B(self.lora_A(x))


for name in ("embed", "value", "up", "head"):
    setattr(base, name, LowRank(getattr(base, name)))

new = (y >= 5).nonzero().squeeze(-1)
new = new[torch.randperm(len(new))]
few, rest = new[:60], new[60:]
train = DataLoader(TensorDataset(x[few], y[few] - 5), batch_size=20, shuffle=True)
options = {"seed": 0, "progress": False}
plain = bayesianize_lora(base, "point")
bayesify.fit(plain, train, epochs=60, learning_rate=1e-2, kl_weight=0.0, **options)

# %% [markdown]
# ## A posterior over the adapter
#
# The posterior starts at the trained adapter. A `kl_weight` below 1 is usual for
# adapters, because a few examples cannot determine all their weights. Choose
# `kl_weight` by the NLL of held-out examples.

# %%
bnn = bayesianize_lora(plain.mean_network(), "inducing")
bayesify.fit(bnn, train, epochs=60, learning_rate=1e-2, kl_weight=0.3, **options)
models = {"plain adapter": plain, "Bayesian adapter": bnn}
predictions = {name: model.predict(x[rest]) for name, model in models.items()}
nll = {}
for name, prediction in predictions.items():
    scores = metrics.evaluate(prediction, y[rest] - 5)
    nll[name] = scores["nll"]
    print(f"{name:<17}", {key: round(value, 3) for key, value in scores.items()})
assert nll["Bayesian adapter"] < nll["plain adapter"]

# %% [markdown]
# ## Confidence against accuracy
#
# On the dashed line, accuracy equals confidence. Predictions below the line are
# overconfident.

# %%
figure, axes = plt.subplots(figsize=(4.5, 4))
axes.plot([0, 1], [0, 1], "--", color="gray")
for name, prediction in predictions.items():
    parts = metrics.reliability(prediction, y[rest] - 5, num_bins=6)
    filled = parts.count > 0
    axes.plot(parts.confidence[filled], parts.accuracy[filled], "o-", label=name)
axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.02))
axes.legend()
figure.tight_layout()
plt.show()
