"""Loss terms: one file, one part. See `kd.core.contracts.Loss`."""
