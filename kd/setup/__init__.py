"""A configuration becomes a `Run`: plans of values, from which parts are opened, built and compared."""
