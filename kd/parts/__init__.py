"""What a `kind:` of a configuration may name, a folder each, and the registry that finds it."""
