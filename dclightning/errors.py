"""The one exception type that means: the user can mend this."""


class UserError(ValueError):
    """Bad input. The message is one line that names the field, the value and what would be right."""
