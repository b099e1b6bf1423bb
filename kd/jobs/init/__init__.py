"""`kd init FOLDER`: look at a folder of images and at this machine, and write the configuration of a first run."""
