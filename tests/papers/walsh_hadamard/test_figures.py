"""How near any matrix is, and how long the transform takes."""

import json

import pytest
import torch
from bayesify_papers.walsh_hadamard import approximability, transform_time
from bayesify_papers.walsh_hadamard.approximability import Search, distances

from bayesify.maths.walsh_hadamard import materialize


@pytest.mark.slow
def test_matrices_that_are_walsh_hadamard_are_found():
    generator = torch.Generator().manual_seed(0)
    # Factors of one sign and of similar size, so that the search has no other optimum to end in.
    left, g, right = (0.5 + torch.rand(5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    least, mean = distances(materialize(left, g, right), Search(starts=8, steps=400), generator)
    assert float(least.max()) < 1e-3
    assert bool((mean >= least).all())


@pytest.mark.slow
def test_two_by_two_is_exact_where_signs_allow():
    """Entries are s1_i s2_j c_{i ^ j}, so w00 w11 and w01 w10 have one sign: then all is reached, else not."""
    generator = torch.Generator().manual_seed(0)
    matrices = 2 * torch.rand(40, 2, 2, generator=generator, dtype=torch.float64) - 1
    least, _ = distances(matrices, Search(starts=10, steps=300), generator)
    possible = matrices[:, 0, 0] * matrices[:, 1, 1] * matrices[:, 0, 1] * matrices[:, 1, 0] > 0
    assert float(least[possible].max()) < 0.02
    assert float(least[possible].median()) < 1e-9
    # Otherwise an entry has to vanish, best the smallest: no product reaches that, and the search comes slowly near.
    smallest = matrices[~possible].abs().flatten(1).min(-1).values / 2
    assert bool((least[~possible] >= smallest - 1e-9).all())
    assert float((least[~possible] - smallest).max()) < 0.02


def test_never_farther_than_the_matrix_of_zeros():
    (row,) = approximability.run([16], 5, Search(starts=2, steps=50))
    assert max(row["distances"]) < 0.62
    assert row["median"] < row["zero_matrix"]


def test_approximability_smoke(smoke):
    done = smoke("walsh-hadamard/approximability")
    stored = json.loads((done.folder / "approximability.json").read_text())
    assert [row["size"] for row in stored["rows"]] == [2, 4, 8]
    assert "eq. 7" in done.printed
    turned = json.loads((done.folder / "geometry.json").read_text())["rows"]
    assert max(max(row["from_product"], row["from_orthonormal"]) for row in turned) < 1e-13
    with pytest.raises(ValueError, match="size 12 is not a power of two"):
        approximability.run([12], 1, Search())


def test_transform_time_smoke(smoke):
    done = smoke("walsh-hadamard/transform-time")
    rows = json.loads((done.folder / "transform_time.json").read_text())["rows"]
    assert [(row["by"], row["size"], row["batch"]) for row in rows] == [
        ("features", 64, 512),
        ("features", 128, 512),
        ("batch", 512, 32),
        ("batch", 512, 64),
    ]
    assert all(row["dense"] > 0 and row["transform"] > 0 for row in rows)
    assert "divided by the time of the dense product" in done.printed


def test_transform_time_reads_the_benchmark(tmp_path, capsys):
    for device, gpu in (("cpu", None), ("gpu", "A GPU")):
        content = {"hardware": {"cpu": "A", "threads": 2, "gpu": gpu}, "figures": {"transform_512_over_dense": 0.25}}
        (tmp_path / f"hadamard_{device}.json").write_text(json.dumps(content))
    assert transform_time.main(["--benchmarks", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[3:]] == [["512", "0.2500", "4.0"]] * 2
    assert lines[4].endswith("A GPU")
    with pytest.raises(FileNotFoundError, match=r"python -m benchmarks\.hadamard, or give --measure"):
        transform_time.read(tmp_path / "none")
