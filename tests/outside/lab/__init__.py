"""A laboratory's own parts: a device and a format, a file each. Nothing in kd/ knows
them.
"""
