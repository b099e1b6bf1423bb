"""An image becomes a batch here: views, loader, workers, the store of pixels."""
