"""Grade-school answers: one number, as GSM8K asks for (Cobbe et al. 2021, arXiv:2110.14168).

1. The answer is found and compared as by `math`, with `metadata["reader"]`.
2. Numbers are exact: 18, 18.00, $18, 18 dollars, "eighteen" are equal, 17.99 is not. A label with at least two decimals
   accepts a longer number that rounds to it.
3. The label is a number, GSM8K's solution text with `#### 18`, or a list of such.
"""

from collections.abc import Mapping
from typing import Any

from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.math import grade_labels
from agentrl.rm_hub.reading import numbers
from agentrl.rm_hub.reading.answers import is_lenient
from agentrl.rm_hub.reading.common import bad_label, golds
from agentrl.rm_hub.reading.latex import clean


def grade_gsm8k(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """1 if the number that the response gives equals the label's, else 0."""
    wanted = [gold.rpartition("####")[2].strip() for gold in golds(label, "gsm8k")]
    if not all(numbers.read(clean(gold)) is not None for gold in wanted):
        raise bad_label("gsm8k", "one number, or a solution that ends with '#### number'", label)
    return grade_labels(response, wanted, is_lenient(metadata, "gsm8k"))
