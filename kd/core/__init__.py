"""The core is shared by all rooms: errors, types, contracts, scores, seeds, text."""
