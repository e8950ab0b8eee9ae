"""Code that the experiments of all papers share: command lines, jobs, data, result files, tables and figures."""
