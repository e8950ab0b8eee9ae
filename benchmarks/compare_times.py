"""Time of `bayesify compare` on two cores, for a table with texts, dates and missing cells and any number of rows.

python benchmarks/compare_times.py --rows 500 --quick
python benchmarks/compare_times.py --rows 20000
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas


def make_table(rows: int, seed: int = 0) -> pandas.DataFrame:
    """Sales that depend on six columns, one of them a text, one a date, one with missing cells."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 4))
    shop = generator.choice(["north", "south", "east", "west"], rows, p=[0.4, 0.3, 0.2, 0.1])
    day = pandas.Timestamp("2020-01-01") + pandas.to_timedelta(generator.integers(0, 1000, rows), unit="D")
    mean = 2 * np.sin(2 * x[:, 0]) + x[:, 1] * (shop == "north") + np.cos(day.day_of_year.to_numpy() / 58)
    y = np.exp(0.5 * mean + generator.normal(0, 0.2 + 0.1 * np.abs(x[:, 2]), rows))
    x[generator.random(rows) < 0.1, 1] = np.nan
    columns = {f"x{index}": column for index, column in enumerate(x.T)}
    return pandas.DataFrame({**columns, "shop": shop, "day": day.strftime("%Y-%m-%d"), "y": y})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--cores", type=int, default=2)
    options, more = parser.parse_known_args()  # other options go to `compare`
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    with tempfile.TemporaryDirectory() as folder:
        table, out = Path(folder) / "sales.csv", Path(folder) / "out"
        make_table(options.rows).to_csv(table, index=False)
        command = [
            sys.executable,
            "-c",
            "from bayesify.cli import main; main()",
            "compare",
            str(table),
            "--target",
            "y",
        ]
        command += ["--workers", str(options.cores), "--out", str(out), *more]
        start = time.monotonic()
        subprocess.run(command, check=True)
        print(f"{options.rows} rows on {options.cores} cores: {time.monotonic() - start:.1f} s")
        for method in json.loads((out / "results.json").read_text())["methods"]:
            times = {key: round(value or 0.0, 2) for key, value in method["times"].items()}
            print(f"{method['name']:20} {times}  NLL {method['mean'].get('nll')}")


if __name__ == "__main__":
    main()
