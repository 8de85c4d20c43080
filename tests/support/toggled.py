"""A setting as it is written on a command line."""

from agentrl.config.fields import all_fields


def flag(name: str, value: str) -> str:
    """The flag of a setting; of a switch `no` turns it off, and what follows the first word are more flags."""
    field = all_fields()[name]
    first, _, more = value.partition(" ")
    if not field.is_bool:
        return f"{field.flag} {value}"
    return f"{f'--no-{field.flag[2:]}' if first == 'no' else field.flag} {more}"
