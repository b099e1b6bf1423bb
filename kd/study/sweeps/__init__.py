"""Many runs of one configuration: what is tried, the processes that train, which end early, and which is the best."""
