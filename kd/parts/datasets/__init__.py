"""Datasets: sources of images and labels. See `kd.core.contracts.Source`."""
