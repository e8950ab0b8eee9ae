"""Results of jobs as files. A file is either complete or absent."""

import hashlib
import json
from pathlib import Path
from typing import Any

from bayesify.arguments.checks import checked
from bayesify.storage import write_file


def result_path(folder: Path, name: str) -> Path:
    """Path of the result of a job."""
    return folder / "jobs" / f"{name}.json"


def write_result(folder: Path, name: str, job: Any, result: dict[str, Any]) -> None:
    """Write a result with its job and a checksum of both, replacing the file atomically."""
    content = {"job": job, "result": result, "sha256": _checksum(job, result)}
    write_file(result_path(folder, name), json.dumps(content, indent=2) + "\n")


def read_result(folder: Path, name: str) -> tuple[Any, dict[str, Any]] | None:
    """The job and the result in a file; `None` if there is no file, or if the file was changed."""
    try:
        content = json.loads(result_path(folder, name).read_text())
        job, result = content["job"], content["result"]
        return (job, result) if content["sha256"] == _checksum(job, result) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _checksum(job: Any, result: Any) -> str:
    return hashlib.sha256(json.dumps([job, result], sort_keys=True).encode()).hexdigest()


def check_folder(owner: str, folder: Path | str) -> Path:
    """The absolute path of a folder, which need not exist. A file or an empty path is refused."""
    if str(folder) == "" or Path(folder).is_file():
        raise ValueError(f"{owner}: folder={str(folder)!r}; give the path of a folder")
    return Path(folder).absolute()


@checked
def read_results(folder: Path | str) -> dict[str, dict[str, Any]]:
    """All results in a folder of `run_jobs`, by name of the job; empty if the folder does not exist yet."""
    jobs = check_folder("read_results", folder) / "jobs"
    found = {}
    for path in sorted(jobs.rglob("*.json")):
        name = path.relative_to(jobs).with_suffix("").as_posix()
        if (entry := read_result(Path(folder), name)) is not None:
            found[name] = entry[1]
    return found
