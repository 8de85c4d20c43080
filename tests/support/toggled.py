"""A setting in the form of a command line."""

from agentrl.config.fields import all_fields


def flag(name: str, value: str) -> str:
    """Return the flag of a setting. `no` turns a switch off, and words after the first are more flags."""
    field = all_fields()[name]
    first, _, more = value.partition(" ")
    if not field.is_bool:
        return f"{field.flag} {value}"
    return f"{f'--no-{field.flag[2:]}' if first == 'no' else field.flag} {more}"
