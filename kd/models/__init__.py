"""Student and teacher models."""
