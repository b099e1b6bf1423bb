"""The training loop and what it is made of. It knows contracts and no part."""
