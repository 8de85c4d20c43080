"""Reading an answer out of a model's text, and comparing it with a label; shared by the graders."""
