"""Episodes played before a run: with a scripted policy behind the real agent loop, template, parser and grader.

1. `Stage.opened` is what a run plays on, without an engine; `play` plays on it and says what is wrong.
2. A `Policy` stands where the engine does: ids in, ids out. What it writes is the template's own text of a turn.
3. What is found is a `Finding`: what, where, and what to do about it."""
