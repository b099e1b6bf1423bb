"""The commands: flags, messages, exit codes, and the processes that they start."""
