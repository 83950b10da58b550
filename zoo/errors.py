"""What can be wrong with what a person gave us, and how it is said: one line that names the file and the field, what
was found, what was expected and what to do. The command line prints that line and exits with 2."""

import errno

from generators.errors import InputError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk, or a quota, that has no room left."""


def one_line(error: BaseException | str) -> str:
    """Return an error's message without line breaks, for a message that quotes it."""
    return " ".join(str(error).split())


class ZooError(InputError):
    """Base of every error that a user can mend; its message is the whole story, on one line."""


class ConfigError(ZooError):
    """A configuration file or a `--set` override does not describe a sweep."""


class PlanError(ZooError):
    """A plan does not fit the sweep directory, the data or the configuration that it meets."""


class StoreError(ZooError):
    """A sweep directory holds something that its commits and plans do not allow."""


class DatasetError(ZooError):
    """A dataset folder or repository cannot be read as a zoo, or a selection from it is impossible."""


class HubError(ZooError):
    """The Hugging Face Hub refused or lost a request; says whether a second try can help."""


class ReleaseError(ZooError):
    """An archive of released checkpoints is not laid out as expected, or is unsafe to read."""


class NFNError(ZooError):
    """A predictor, its configuration or its training data do not fit together."""
