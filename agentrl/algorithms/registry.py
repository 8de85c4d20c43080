"""The names of the advantage estimators, known without importing torch.

1. A built-in estimator is a module attribute named here; `advantages.get_estimator` resolves it.
2. A name with a colon is a path to a user's function (`pkg.mod:function`), loaded when first used.
"""

import difflib

ESTIMATORS: dict[str, str] = {"grpo": "agentrl.algorithms.advantages:grpo"}
"""Built-in estimators: flag value -> where the function lives."""


def check_estimator_name(name: str) -> str:
    """Return `name` if it is a built-in estimator or looks like a path to one.

    Raises:
        ValueError: it is neither; the message lists what exists.
    """
    if name in ESTIMATORS or ":" in name:
        return name
    close = difflib.get_close_matches(name, ESTIMATORS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"unknown advantage_estimator {name!r}, expected one of {sorted(ESTIMATORS)} or pkg.mod:function{hint}"
    )
