"""A finished student as files for others: timm folder, graphs, parity, calibration, model card, hub."""
