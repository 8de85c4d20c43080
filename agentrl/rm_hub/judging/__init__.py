"""What the judge grader needs besides: its cache, and reading its verdicts."""
