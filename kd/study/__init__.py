"""Looks at data and at finished runs: reports, sweeps, audits."""
