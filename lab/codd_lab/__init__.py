"""Research beside codd: tasks, judges, studies and reports; word problems; pretraining."""
