"""Export of a finished student: timm folder, graphs, parity, calibration, model card,
hub.
"""
