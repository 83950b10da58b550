"""The one error kind of the ground floor."""


class InputError(ValueError):
    """Input that cannot be used as given. The message is one line: where, what was found, what was expected, what to do
    about it."""
