"""Teachers: where a frozen model comes from. See `kd.core.contracts.TeacherModel`."""
