# %% [markdown]
# # A small ResNet that knows when it guesses
#
# This notebook trains a small residual network on the 8 x 8 digits that ship with
# scikit-learn. `Laplace` then puts a posterior over the last layer of the network,
# without further training. At the end, the network predicts digits that lie on their
# side.

# %%
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, metrics

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 8 - 1
y = torch.tensor(labels)
order = torch.randperm(len(x))
train, test = order[:500], order[500:]
loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=50, shuffle=True)

# %% [markdown]
# ## The network
#
# The network is an ordinary module. The network has two residual blocks with batch
# normalization and 16 channels.


# %%
class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(h)))


net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    Block(16),
    nn.MaxPool2d(2),
    Block(16),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Linear(64, 10),
)

optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(15):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
net.eval()

# %% [markdown]
# ## A posterior over the last layer
#
# `Laplace.fit` reads the training data once. The predicted class of an image hardly
# ever changes, but the probability of this class does.

# %%
laplace = bayesify.Laplace(net, likelihoods.Categorical(), subset="last_layer")
laplace.fit(loader)
upright = laplace.predict(x[test])
scores = metrics.evaluate(upright, y[test])
print({name: round(value, 3) for name, value in scores.items()})
assert scores["accuracy"] > 0.9

# %% [markdown]
# ## Digits on their side
#
# Most rotated digits are no longer digits, so no predicted class is right. The entropy
# of the prediction separates rotated from upright digits. You can therefore reject
# predictions with an entropy above a threshold.

# %%
rotated = laplace.predict(x[test].rot90(dims=(2, 3)))
found = metrics.ood(upright, rotated)
print(f"AUROC by entropy: {found['auroc_entropy']:.3f}")
print(f"AUROC by mutual information: {found['auroc_mutual_information']:.3f}")
assert found["auroc_entropy"] > 0.75

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
bins = torch.linspace(0, 2.3, 24).numpy()
for name, prediction in {"upright": upright, "rotated": rotated}.items():
    left.hist(prediction.entropy.numpy(), bins, density=True, alpha=0.6, label=name)
left.set(xlabel="entropy of the prediction, nats", ylabel="density")
left.legend()
unsure = rotated.entropy.argsort(descending=True)[:8]
rows = nn.functional.pad(x[test].rot90(dims=(2, 3))[unsure, 0], (1, 1, 1, 1), value=-1)
grid = rows.unflatten(0, (2, 4)).transpose(1, 2).reshape(20, 40)
right.imshow(grid.numpy(), cmap="gray_r")
right.set(title="the least certain rotated digits", xticks=[], yticks=[])
figure.tight_layout()
plt.show()
