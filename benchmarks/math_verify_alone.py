"""math_verify without another reader, for the table of `benchmarks.grader_errors`: it finds the answer itself."""

from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify

from agentrl.rm_hub import Grade


def math(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    found = parse(response)
    right = bool(verify(parse(f"${label}$"), found))
    return Grade(float(right), right, extracted=str(found[-1]) if found else None, reason=f"math_verify finds {found}")


gsm8k = math
