"""What a person sees while a run goes: the console, and experiment trackers."""
