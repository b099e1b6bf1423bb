"""Export, serving, prediction for many images, drift detection, and the verification of
exports.
"""
