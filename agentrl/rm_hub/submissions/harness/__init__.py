"""Programs that run inside the sandbox when submitted code is tested. The grader itself imports nothing from here.
`answer` runs the submission in one sandbox; `tests`, `standins`, `forms` run tests in another. Both use `values`."""
