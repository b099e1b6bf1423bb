"""Datasets: where images lie. See `kd.core.contracts.Source`."""
