"""Random changes to files: headers, tensors and bytes."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def odd_values(secret: Path) -> list[Any]:
    nested: Any = []
    for _ in range(200):
        nested = [nested]
    return [
        *(
            None,
            True,
            0,
            -1,
            3,
            1.5,
            10**4,
            10**7,
            10**12,
            10**30,
            float("nan"),
            float("inf"),
            "",
            "x",
            str(secret),
            "mean_field",
        ),
        *({}, [], nested, [1, 2], {"name": "mean_field"}, {"name": str(secret)}, {"$tensor": "nothing"}, {"$tuple": 3}),
        *(
            {"$dict": [[[], 1]]},
            {"$counter": [["a"]]},
            {"posterior": str(secret)},
            "x" * 10_000,
            "BayesianNetwork",
            "DeepGP",
        ),
    ]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside nested data."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, entry in items:
        found += places(entry, (*path, key))
    return found


def mutate(chance: random.Random, header: dict[str, Any], tensors: dict[str, Tensor], secret: Path) -> None:
    """Make one to three changes, in place."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        if chance.random() < 0.25 and tensors:
            name = chance.choice(sorted(tensors))
            kind = chance.randrange(5)
            if kind == 0:
                del tensors[name]
            elif kind == 1:
                tensors[f"{name}x"] = tensors.pop(name)
            elif kind == 2:
                tensors[name] = tensors[name].flatten()[: chance.randrange(4)]
            elif kind == 3:
                tensors[name] = tensors[name].to(chance.choice((torch.int64, torch.float64, torch.bool)))
            else:
                tensors[name] = (
                    torch.full_like(tensors[name], float("nan")) if tensors[name].is_floating_point() else tensors[name]
                )
            continue
        known = places(header)
        config = [path for path in known if path[0] == "config"] or known
        *before, last = chance.choice(config if chance.random() < 0.7 else known)
        holder: Any = header
        for key in before:
            holder = holder[key]
        if chance.random() < 0.15 and isinstance(holder, dict):
            del holder[last]
        elif chance.random() < 0.1 and isinstance(holder, dict):
            holder[f"{last}x"] = chance.choice(odd_values(secret))
        else:
            holder[last] = chance.choice(odd_values(secret))
