"""Calls of every public callable with wrong arguments, and the outcome of each call.

    python fuzz_arguments.py OUT.json SHARE SEED [PART-OF-A-NAME]

An error is clear if it is a ValueError, a TypeError or an OSError whose message names the argument and says what to give.
"""

import json
import os
import random
import re
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from public_calls import CALLS

SECONDS = 10
"""Largest processor time of a call. Wall-clock time would end calls on a busy machine."""
VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "1e300": 1e300,
    "2**40": 2**40,
    "empty text": "",
    "text": "abc",
    "empty list": [],
    "empty dict": {},
    "object": object(),
    "function": lambda *anything: None,
    "array": np.zeros((3, 7)),
    "tensor": torch.zeros(3, 7, 2),
    "nan tensor": torch.full((8, 2), float("nan")),
    "path": Path("no/such/place"),
}
REMEDY = re.compile(
    r"\b(give|use|choose|set|make|put|call|add|train|fit|draw|remove|did you mean|known:|no such file|does not exist)",
    re.I,
)
THINGS = {
    "x": "inputs",
    "y": "targets?|labels?",
    "learning_rate": "learning rate",
    "max_rows": "max-rows",
    "context_inputs": "inputs",
    "posterior": "method",
    "train_loader": "loader",
    "data": "loader",
}
"""Names of some arguments in messages."""


class Endless(BaseException):
    """Exception for a call that takes too long."""


def stop(*_: Any) -> None:
    raise Endless


def judge(name: str, argument: str, value: Any) -> tuple[str, str]:
    """Outcome of a call (accepted, clear, vague, obscure or endless) and its message."""
    function, arguments = CALLS[name]()
    arguments[argument] = value
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        function(**arguments)
    except Endless:
        return "endless", ""
    except (ValueError, TypeError, OSError) as error:
        words = f"{type(error).__name__}: {error}"
        named = re.search(rf"\b({re.escape(argument)}|{THINGS.get(argument, argument)})\b", str(error))
        return ("clear" if named and REMEDY.search(str(error)) else "vague"), words
    except BaseException as error:
        return "obscure", f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "accepted", ""


def same(value: Any, usual: Any) -> bool:
    """Whether a value equals the valid one."""
    return type(value) is type(usual) and isinstance(value, str | int | float | bool | type(None)) and value == usual


def main(out: str, share: float, seed: int, only: str = "", folder: str = ".") -> None:
    """Make a share of the calls in a folder. The seed determines which calls are made."""
    os.chdir(folder)
    signal.signal(signal.SIGPROF, stop)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen, found = random.Random(seed), []
    for name, make in CALLS.items():
        if only and only not in name:
            continue
        function, arguments = make()
        if "no-such-folder" not in str(arguments.get("folder")):
            function(**arguments)  # the valid arguments must be accepted
        for argument, usual in arguments.items():
            for word, value in VALUES.items():
                if chosen.random() < share and not same(value, usual):
                    start = time.perf_counter()
                    how, words = judge(name, argument, value)
                    found.append([name, argument, word, how, words[:300], round(time.perf_counter() - start, 3)])
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
