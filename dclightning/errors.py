"""What is said to the user about input that cannot work."""

import re
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


def one_line(error: BaseException) -> str:
    """What an error says, without what only the parser's authors need."""
    message = " ".join(str(error).split())
    message = re.sub(r"Type collections\.abc\.Callable\S*.*? expects a function or a callable class: ", "", message)
    message = re.sub(r"\.? Got value: NestedArg\(.*\)$", "", message)
    if of_union := re.search(r"Union subtypes .*? - ([\w.]+=\S+: must .*?) - Expected a <class 'NoneType'>", message):
        return of_union[1]
    if "invalid strategy name" in message:
        chosen = re.search(r"strategy='(.*?)'", message)
        return (
            f"trainer.strategy={chosen[1] if chosen else ''!r}: must be a name of Lightning's, such as auto or ddp; "
            "others are given as --trainer.strategy.class_path dclightning.ParallelStrategy"
        )
    # The parser takes the name of a class that it does not know for a file.
    if unknown := re.search(
        r'"([\w.]+)": - Expected a path but (\S+) either not accessible or invalid - (.*)', message
    ):
        key, value, reason = unknown.groups()
        if reason.startswith("Expected a"):
            reason = f"there is no such class; yours go by import path, as mine.{value}"
        return f"{key}={value!r}: {reason}"
    head, union, rest = message.partition(" - Expected a path but ")
    if not union:
        head, union, rest = message.partition(" Does not validate against any of the Union subtypes ")
    if not union:
        return message
    # A reason for each type that was tried: the first is the type that was meant.
    reason = rest.partition(" Errors: - ")[2].split(" - ")[0].partition(" Given value type")[0]
    return f"{head} {reason}. Got value: {rest.rpartition(' Given value: ')[2]}"
