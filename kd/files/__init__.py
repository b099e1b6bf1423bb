"""Bytes on a disk or under a URL: atomic writes, checksummed records, stores, shards, the run folder, checkpoints."""
