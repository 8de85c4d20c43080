"""Parts of the code grader: they find the program and its tests, and run both in the sandbox."""
