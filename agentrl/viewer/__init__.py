"""`agentrl view`: a local page with runs side by side and every trajectory, live while they are written.

`library` is what there is to see, `query` what a page shows (all of it in its address), `search` the index of texts,
`table`, `trajectory` and `curves` the pages, `app` what they have in common. Nothing here writes into a store or a run,
but the index of texts beside a store."""
