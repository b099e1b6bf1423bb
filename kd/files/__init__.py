"""Files on disk or at a URL: atomic writes, checksummed records, shards, the run
folder, checkpoints.
"""
