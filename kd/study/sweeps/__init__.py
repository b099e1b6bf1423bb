"""Many runs of one configuration: the trials, their processes, and the best one."""
