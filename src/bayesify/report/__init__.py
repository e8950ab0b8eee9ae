"""Reports: one self-contained HTML page from what an experiment found."""

from bayesify.report.demo import render_demo
from bayesify.report.page import write_page

__all__ = ["render_demo", "write_page"]
