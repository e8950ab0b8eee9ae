"""A transformer whose last layer alone is Bayesian, called by keyword."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, posteriors


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Classifier(nn.Module):
    """Tokens to one of two classes."""

    def __init__(self, vocabulary: int = 12, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoderLayer(
            width, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True
        )
        self.classifier = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Output:
        hidden = self.encoder(
            self.embed(input_ids), src_key_padding_mask=attention_mask == 0
        )
        mask = attention_mask.unsqueeze(-1)
        return Output(self.classifier((hidden * mask).sum(1) / mask.sum(1)), hidden)


def sentences(count: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Ten tokens, some of them padding; the label is whether token 3 occurs."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 12, (count, 10), generator=generator)
    lengths = torch.randint(4, 11, (count, 1), generator=generator)
    mask = (torch.arange(10) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask}, ((ids == 3) & (mask == 1)).any(
        -1
    ).long()


def main() -> None:
    torch.manual_seed(0)
    x, y = sentences(400, seed=0)
    bnn = bayesify.bayesianize(
        Classifier(),
        {
            "classifier": posteriors.FullCovariance(init_std=1e-2),
            "encoder.self_attn": posteriors.Point(),
        },
        likelihood=likelihoods.Categorical(),
    )
    print(bnn.summary())
    optimizer = torch.optim.Adam(bnn.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        (-bnn.elbo(x, y, num_data=len(y), num_draws=4) / len(y)).backward()
        optimizer.step()

    x_test, y_test = sentences(400, seed=1)
    prediction = bnn.predict(
        x_test, num_draws=32
    )  # the likelihood is about the output called logits
    accuracy = (prediction.labels == y_test).float().mean()
    wrong = prediction.labels != y_test
    print(
        f"accuracy {accuracy:.2f}, mean entropy {prediction.entropy.mean():.2f} nats",
        end="",
    )
    print(
        f", where wrong {prediction.entropy[wrong].mean():.2f}" if wrong.any() else ""
    )
    assert bnn.draw(3)(**x_test).hidden.shape == (3, 400, 10, 16)


if __name__ == "__main__":
    main()
