"""Parameter groups, schedule, weight averaging."""
