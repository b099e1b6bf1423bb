"""Classify many images with an export, on a CPU, without torch."""
