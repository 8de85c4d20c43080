"""The store between rollout and training.

1. `ledger`, `sqlite`, `states`, `queries`: the durable truth about which group was trained.
2. `queue` joins a data source, the buffer filter and a ledger for the rollout.
3. `codec` is the form of a stored group; `store` keeps what was played for people to look at, `reader` finds it there;
   `dump` writes whole rollouts for debugging.
4. It imports `data`, never the other way round.
"""
