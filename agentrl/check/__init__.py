"""Episodes before a run, with a scripted policy and the real agent loop, template, parser and grader.

1. `Harness.opened` sets up a run without an engine; `play` plays episodes in it and reports findings.
2. A `Policy` replaces the engine: ids in, ids out. It writes each turn as the chat template renders the turn.
3. A `Finding` names a problem, its place, and its remedy."""
