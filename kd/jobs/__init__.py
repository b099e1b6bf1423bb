"""What the commands do: one job a module, from a configuration or a run folder to artifacts."""
