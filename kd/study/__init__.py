"""Studies of data and of finished runs: reports, sweeps, audits."""
