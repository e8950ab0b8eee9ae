"""Many independent runs on processes of this machine, on a Dask cluster or on a Ray cluster."""

from bayesify.scale_out.engines import ENGINES
from bayesify.scale_out.jobs import JobsFailed, run_jobs
from bayesify.scale_out.result_files import read_results

__all__ = ["ENGINES", "JobsFailed", "read_results", "run_jobs"]
