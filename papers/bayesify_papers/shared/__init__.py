"""What the experiments of all papers share: their command lines, jobs, data, result files, tables and figures."""
