"""The experiments of Ober & Aitchison 2021, "Global inducing point variational posteriors"."""
