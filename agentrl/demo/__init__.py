"""The demo: a tiny model learns to use a calculator, on a laptop, within minutes.

1. `task` is the task itself: problems, the `calculator` tool, `CalculatorEnv`. Held-out problems use operands that
   never occur in training, so their answers cannot be memorized.
2. The shipped model was taught by `examples.tiny_models.calculator`: first correct tool use (`skill`), then deliberately
   imperfect behaviour (`habit`), so that reinforcement learning has something to improve.
3. `example` runs a learning example: it trains a shipped model. `run` defines the calculator's example, and
   `python -m agentrl.demo` runs it."""
