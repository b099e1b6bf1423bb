"""What every room knows: errors, types, contracts, scores, intervals, seeds, text, this machine."""
