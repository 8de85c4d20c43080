"""Checks arguments by JSON schemas from outside: `python schema_worker.py SECONDS`, run by `schema_check`.

1. An input line is JSON: `[schema, arguments]`, with the schema as text. The output line is a list of mistakes
   `[path, message]`, or a text that says why the schema cannot be used.
2. A pattern or reference may run without end. After SECONDS of CPU time for a line, the kernel ends this process.
3. References resolve only inside the schema: nothing is fetched."""

import json
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from jsonschema import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from jsonschema_specifications import REGISTRY

_MEMORY = 2 << 30
_MAX_PROBLEMS, _MAX_CHARS = 5, 1000


@lru_cache
def _validator(schema: str) -> Validator:
    read = json.loads(schema)
    family = validator_for(read, default=Draft202012Validator)
    family.check_schema(read)
    return family(read, registry=REGISTRY)


def answer(schema: str, arguments: Any) -> list[tuple[str, str]] | str:
    try:
        errors = sorted(_validator(schema).iter_errors(arguments), key=lambda error: error.json_path)
        return [(error.json_path[:_MAX_CHARS], error.message[:_MAX_CHARS]) for error in errors[:_MAX_PROBLEMS]]
    except SchemaError as error:
        return error.message[:_MAX_CHARS]
    except RecursionError:
        return "it refers to itself without end, or nests too deeply"
    except Exception as error:  # noqa: BLE001 - a schema is foreign code, and can raise anything
        return f"{type(error).__name__}: {error}"[:_MAX_CHARS]


def main(seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        print(json.dumps(answer(*json.loads(line))), flush=True)  # noqa: T201
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]))
