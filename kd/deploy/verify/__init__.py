"""Whether what an export says of itself is so: claims, the images that they are of, the chain."""
