"""Commands that a user starts: one job a module, from a configuration or a run folder to artifacts."""
