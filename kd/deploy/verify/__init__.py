"""Verification of an export's claims: files, images, outputs, and its run."""
