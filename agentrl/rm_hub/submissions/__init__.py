"""Parts of the code grader: finding the program, its tests, and running them in the sandbox."""
