"""Programs that run inside the sandbox when submitted code is tested; nothing here is imported by the grader itself.

`answer` runs the submission in one sandbox, `tests` (with `standins`, `forms`) the tests in another; `values` is for both."""
