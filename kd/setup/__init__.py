"""What a configuration leaves open, found out when a run starts: kernels, batch, workers, whether a sifter pays."""
