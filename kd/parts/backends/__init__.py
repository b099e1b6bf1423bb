"""Backends: devices and collectives of one process. See `kd.core.contracts.Backend`."""
