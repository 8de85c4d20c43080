"""Programs that run inside the sandbox when submitted code is tested; nothing here is imported by the grader itself.

`values` goes before both of the others: `answer` runs the submission in one sandbox, `tests` runs the tests in another.
"""
