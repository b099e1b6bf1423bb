"""Sifters: which images an epoch visits. See `kd.core.contracts.Sifter`."""
