"""What the code grader needs besides: finding the program, its tests, and running them in the sandbox."""
