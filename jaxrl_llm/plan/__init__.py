"""Planning without the machine: whether a run fits it, how fast the run can be, and which resource limits it."""
