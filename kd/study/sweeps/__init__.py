"""Many runs of one configuration: what is tried, the processes that train, and which is the best."""
