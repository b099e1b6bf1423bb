"""Tasks: what a model answers, how it is scored, and how that is shown. One file, one task."""
