"""Programs that write parts of the documentation from stored results, and the hook that builds its formulas."""
