"""What lies on a disk or under a URL: atomic files, object stores, tar shards, manifests, pixels."""
