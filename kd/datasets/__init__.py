"""Datasets: where images lie. See `kd.contracts.Source`."""
