"""From a source to batches: views, transforms, sampler, loader."""
