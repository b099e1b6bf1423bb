"""The loop. It knows contracts and nothing concrete."""
