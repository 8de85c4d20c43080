"""HTML out of templates. Everything that comes from a store is escaped: it is shown, never interpreted."""

import time
from collections.abc import Callable
from functools import cache

from jinja2 import Environment as Jinja

from agentrl.observability.charts import number
from agentrl.observability.report import templates


@cache
def _templates() -> Jinja:
    jinja = templates("viewer", "observability")
    jinja.filters["figure"] = lambda value: "–" if value is None else number(value)
    jinja.filters["colour"] = lambda value: "muted" if value is None else "good" if value > 0 else "bad"
    jinja.filters["clock"] = lambda at: time.strftime("%m-%d %H:%M", time.localtime(at))
    return jinja


def macro(template: str, name: str) -> Callable[..., str]:
    """A macro of a template."""
    found: Callable[..., str] = getattr(_templates().get_template(template).module, name)
    return found
