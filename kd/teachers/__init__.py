"""Teachers: where a frozen model comes from. See `kd.contracts.TeacherModel`."""
