"""The components that `kind:` may name, one folder per type, and their registry."""
