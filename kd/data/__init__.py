"""From an image to a batch: views, loader, workers, the store of decoded pixels."""
