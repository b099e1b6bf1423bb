"""Networks: sources of teachers and students. See `kd.core.contracts.TeacherModel`."""
