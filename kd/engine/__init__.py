"""The training loop; depends only on the protocols in kd.core."""
