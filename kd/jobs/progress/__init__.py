"""Show the progress of a run on the terminal and in experiment trackers."""
