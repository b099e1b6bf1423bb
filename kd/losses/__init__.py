"""Loss terms: one file, one part. See `kd.contracts.Loss`."""
