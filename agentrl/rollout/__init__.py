"""The rollout room: prompts in, finished and graded groups of samples out.

1. `agent_loop` is the default generate; custom functions come in through `functions`, with `helpers` for them.
2. `loop` runs many trajectories at once and settles failures; `scheduler` decides how many groups to start.
3. `rewards`, `filters` and `evaluate` grade, select and measure.
4. It imports neither `train` nor `cluster`.
"""
