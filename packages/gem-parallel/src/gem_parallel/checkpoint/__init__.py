"""Checkpoints: saved in the background, whole or absent, resharded on load; tables as Parquet."""
