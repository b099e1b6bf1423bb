"""Networks: where a teacher or student comes from. See `kd.core.contracts.TeacherModel`."""
