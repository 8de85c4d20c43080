"""`agentrl view`: a local page with runs side by side and every trajectory, updated while they are written.

`library` has the runs and their stores, `query` the state of a page (all in its address), `search` the text index.
`table`, `trajectory` and `curves` are the pages, `app` their common parts. The viewer writes only the text index beside
a store."""
