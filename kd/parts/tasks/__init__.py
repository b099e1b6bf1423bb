"""Tasks: predictions, scores and their display. One file, one task."""
