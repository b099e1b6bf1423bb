"""What the terminal and experiment trackers show while a run goes."""
