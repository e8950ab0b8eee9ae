"""The demonstration, which runs the methods on toy problems and reports the results."""
