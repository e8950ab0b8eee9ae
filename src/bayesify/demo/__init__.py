"""The demonstration: every method on toy problems, and its report."""
