"""Tasks: what a model predicts, how it is scored, and how that is shown. One file, one task."""
