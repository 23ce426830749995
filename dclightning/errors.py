"""What is said to the user about input that cannot work."""

from typing import Any, get_args


class UserError(ValueError):
    """Bad input. The message is one line that names the field, the value and what would be right."""


class RunStoppedError(UserError):
    """Ends a run between two rollouts, where a checkpoint of it can be saved, for a reason that the user can mend."""


def check_choice(field: str, value: str, choices: Any) -> None:
    """Refuse a value that is not in a ``Literal``; raises ValueError."""
    if value not in get_args(choices):
        raise ValueError(f"{field}={value!r}: must be one of {', '.join(get_args(choices))}")


def check_type(field: str, value: object, kind: type) -> None:
    """Refuse an object of another class; raises TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"{field}={value!r}: must be a {kind.__name__}, such as those of dclightning")
