"""Backends: devices and collectives of one process. See `kd.contracts.Backend`."""
