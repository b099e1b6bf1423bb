"""Sifters: which images are used in each epoch. See `kd.core.contracts.Sifter`."""
