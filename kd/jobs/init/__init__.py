"""`kd init FOLDER`: inspect a folder of images and this machine, and write the
configuration of a first run.
"""
