"""A configuration becomes a `Run`: plans of values, then what they name is opened, built and compared."""
