"""Files that version 0.1.0 wrote: each loads and predicts the same, or is refused with the remedy.

`earlier/` holds the files, written before the composition root, the single recipe for tables and the single fitted state.
`expected.json` has the predictions of the version that wrote them, for two rows and 64 draws of generator seed 0.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import bayesify

FOLDER = Path(__file__).with_name("earlier")
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
ROWS = torch.tensor([[0.5, -1.0, 0.25], [1.5, 0.0, -2.0]])


def test_every_file_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == {*EXPECTED, "estimator"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_of_an_earlier_version_predicts_the_same(name: str) -> None:
    """The tolerance is for the rounding of float32 on other processors, 1e-7 per operation."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2 if name == "heteroscedastic" else 1))
    model = bayesify.load(FOLDER / f"{name}.safetensors", net)
    found = model.predict(ROWS, 64, generator=torch.Generator().manual_seed(0))
    for key in ("mean", "std"):
        wanted = torch.tensor(EXPECTED[name][key])
        torch.testing.assert_close(getattr(found, key).flatten().float(), wanted, rtol=1e-4, atol=1e-5)


def test_an_estimator_of_an_earlier_version_is_refused_with_the_remedy() -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(ValueError, match=r"written by an earlier version of bayesify; fit again with this version"):
        bayesify.load(FOLDER / "estimator.safetensors")
