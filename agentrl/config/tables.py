"""Tables about settings, which are files beside the code that reads them, and the conditions in them."""

import csv
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from agentrl.config.values import json_or_text

_CONDITION = re.compile(r"(!?)(\w+)(!?=|>|)([^|]*)")


def rows(package: str, table: str) -> list[list[str]]:
    """The lines of a package's table (`flags.tsv`) below its head."""
    lines = files(package).joinpath(table).read_text(encoding="utf-8").splitlines()
    return list(csv.reader(lines[1:], delimiter="\t", quoting=csv.QUOTE_NONE))


def holds(needs: str, values: Mapping[str, Any]) -> bool:
    """Whether one of the conditions does: `a|b` either, `!a` without, `a>1` more, `a=x` and `a!=x` this or another."""
    for without, name, sign, wanted in _CONDITION.findall(needs):
        value = values.get(name)
        number = json_or_text(value) if isinstance(value, str) else value
        match sign:
            case ">":
                found = isinstance(number, int | float) and number > float(wanted)
            case "":
                found = bool(number) and number != "None"
            case _:
                found = (str(value) == wanted) == (sign == "=")
        if found != bool(without):
            return True
    return False
