"""Reports of a run: progress, tables, model cards, trackers."""
