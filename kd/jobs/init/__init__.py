"""Inspect a folder and this machine for `kd init`, and write a first configuration."""
