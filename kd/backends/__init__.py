"""Backends: the world of one process. See `kd.contracts.Backend`."""
