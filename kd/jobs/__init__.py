"""Run the jobs behind the commands, one per module."""
