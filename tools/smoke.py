"""Install the built wheel and source distribution in empty environments outside the checkout, and try them there.

    python -m tools.smoke                  # the package alone, then with each extra alone
    python -m tools.smoke sklearn onnx     # the package alone, then with these extras
    python -m tools.smoke --only-package   # the package alone

Run `make wheel` first; `make smoke` does both. Environments of extras share the packages of the environment without extras, so
that torch is installed once. Otherwise they contain only the packages of the extra.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.smoke_checks import CHECKS

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command in a folder without this process's Python path. Show its output only if it fails."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


class Environments:
    """Empty environments in a folder.

    Args:
        folder: Folder outside the checkout.
        constraints: Constraints of every installation.
    """

    def __init__(self, folder: Path, constraints: Path) -> None:
        self.folder, self.constraints = folder, constraints

    def make(self, name: str, below: str | None = None) -> Path:
        """Make an environment and return its Python. It also sees the packages of the environment `below`, if given."""
        home = self.folder / name
        run(sys.executable, "-m", "venv", home, cwd=self.folder)
        if below is not None:
            (packages,) = (self.folder / below).glob("lib/python*/site-packages")
            (own,) = home.glob("lib/python*/site-packages")
            (own / "below.pth").write_text(f"{packages}\n")
        return home / "bin" / "python"

    def install(self, python: Path, *what: str | Path) -> None:
        """Install packages under the constraints."""
        options = ("--quiet", "--disable-pip-version-check", "-c", self.constraints)
        run(python, "-m", "pip", "install", *options, *what, cwd=self.folder)

    def check(self, python: Path, *extra: str) -> None:
        """Run the checks of the package or of an extra in a new empty folder."""
        place = self.folder / f"run-{python.parents[1].name}"
        place.mkdir()
        shutil.copy(ROOT / "tools" / "smoke_checks.py", place)
        run(python, "smoke_checks.py", *extra, cwd=place)


def built(pattern: str) -> Path:
    """The only built file that matches a pattern."""
    found = sorted(DIST.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"smoke: {len(found)} files match dist/{pattern}; remove dist and run make wheel")
    return found[0]


def main() -> None:
    """Try the package and its extras, and print each success with its time."""
    parser = argparse.ArgumentParser(description="Try the built distributions in empty environments.")
    parser.add_argument("extras", nargs="*", help="extras to try; all by default")
    parser.add_argument("--only-package", action="store_true", help="try no extras")
    parser.add_argument("--torch", default="torch", help="what to install as torch")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    options = parser.parse_args()
    unknown = set(options.extras) - set(CHECKS)
    if unknown:
        parser.error(f"unknown extras: {', '.join(sorted(unknown))}; known: {', '.join(CHECKS)}")
    extras = [] if options.only_package else options.extras or list(CHECKS)
    wheel, source = built("*.whl"), built("*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="bayesify-smoke-") as name:
        environments = Environments(Path(name), options.constraints.resolve())
        for case in ("package", "source", *extras):
            start = time.perf_counter()
            python = environments.make(case, None if case == "package" else "package")
            if case == "package":
                environments.install(python, *options.torch.split())
                environments.install(python, wheel)
            elif case == "source":
                environments.install(python, "--no-deps", "--force-reinstall", source)
            else:
                environments.install(python, f"{wheel}[{case}]")
                environments.install(python, "--no-deps", "--force-reinstall", wheel)
            environments.check(python, *([] if case in ("package", "source") else [case]))
            print(f"{case}: works ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
