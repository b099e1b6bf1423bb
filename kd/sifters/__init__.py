"""Sifters: which images an epoch visits. See `kd.contracts.Sifter`."""
