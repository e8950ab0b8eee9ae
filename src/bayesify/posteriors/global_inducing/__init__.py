"""Global inducing points (Ober and Aitchison 2021)."""
