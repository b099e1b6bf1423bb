"""What a run leaves on the disk: safetensors and JSON, never pickle."""
