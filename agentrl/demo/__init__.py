"""The demo: a tiny model learns to use a calculator, on a laptop, within minutes.

1. `task` is the task itself: problems, the `calculator` tool, `CalculatorEnv`. Held-out problems use operands that
   never occur in training, so their answers cannot be known by heart.
2. The shipped model was taught by `examples.tiny_models.calculator`: first correct tool use (`skill`), then deliberately
   imperfect behaviour (`habit`), so that reinforcement learning has something to improve.
3. `example` runs a learning example: a shipped model, then the training run. `run` is the calculator's, and
   `python -m agentrl.demo` its command."""
