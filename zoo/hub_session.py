"""One repository on the Hub: reading its state, patience with what passes, one clear line for what does not.

What can help is tried again: 429 and 5xx answers and broken connections, a bounded number of times, for as long as
`Retry-After` says. What cannot (401, 403, 404, refused content) is an error at once. A commit that meets another
publisher's raises `Conflict`, and the caller looks at the repository anew.
"""

import importlib.util
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import sleep
from typing import TypeVar

from huggingface_hub import HfApi, HfFileSystem, constants, get_token

# HTTPError is the base of the HTTP client's own errors: which client that is differs between the library's versions.
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from tqdm import tqdm

from zoo.errors import HubError
from zoo.hub_folder import redact

ATTEMPTS = 6
"""How often a request that may pass is made in all."""
FIRST_ATTEMPTS = 2
"""How often in all while no Hub was ever reached: a wrong address or no network does not pass."""
LONGEST_WAIT = 3600
"""Seconds; the Hub counts commits by the hour. Who is asked to wait longer is told so instead."""
PASSING = frozenset({429, 500, 502, 503, 504})
CONFLICTS = frozenset({409, 412})
HUB_OWN_FILES = frozenset({".gitattributes"})
"""Files that the Hub itself puts into every repository, which are no part of a dataset."""

Result = TypeVar("Result")


class Conflict(HubError):
    """The branch has moved since it was read; whoever wants to commit must read it again."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a revision; `sha256` only where the Hub keeps it as a large file, else git's id of the content."""

    name: str
    size: int
    sha256: str | None
    git_oid: str


@dataclass(frozen=True)
class Revision:
    """A revision of a repository: the commit's id and its files by name, without the Hub's own."""

    commit: str
    private: bool
    files: dict[str, RemoteFile]


class Session:
    """Requests for one dataset repository, with the token of the environment or the Hub's own file.

    Raises HubError where `repo` is not of the form user/name.
    """

    def __init__(self, repo: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", repo):
            raise HubError(f"repository {repo!r}: expected user/name (letters, digits, '-', '_', '.')")
        self.repo = repo
        self.api = HfApi()
        self.token = get_token()
        self._reached = False

    def require_token(self) -> None:
        """Raises HubError where no token is to be found, before anything is sent."""
        if self.token is None:
            raise HubError(f"{self.repo}: found no Hub token; set HF_TOKEN or run `hf auth login`")

    def call(self, doing: str, request: Callable[[], Result], patient: bool = True) -> Result:
        """What the request returns; errors become a HubError that says what was being done.

        With `patient` the request is made again where that can help. Without it, its own client does that already.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                result = request()
                self._reached = True
                return result
            # An upload's HTTP error comes wrapped in a RuntimeError, a refused card as a ValueError, Xet's as OSErrors.
            except (HTTPError, OSError, RuntimeError, ValueError) as error:
                cause = _http_error(error)
                status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
                passing = cause is not None and (status is None or status in PASSING)
                unreachable = not self._reached and _never_connected(error)
                if unreachable and attempt == FIRST_ATTEMPTS:
                    raise HubError(
                        f"{self.repo}: {doing}: {self.api.endpoint} could not be reached; nothing was sent. Check the "
                        f"network and HF_ENDPOINT. What was said: {redact(str(error), self.token)}"
                    ) from None
                self._reached |= not unreachable
                if not patient or not passing or attempt == ATTEMPTS:
                    # Not chained: a traceback would print the server's words as they came.
                    raise self._explain(error, status, passing, doing) from None
                self._wait(cause, status, doing, attempt)
        raise AssertionError("the last attempt returns or raises")

    def _wait(self, cause: HTTPError | None, status: int | None, doing: str, attempt: int) -> None:
        asked = _retry_after(cause) if isinstance(cause, HfHubHTTPError) else None
        seconds = asked if asked is not None else min(2.0 ** (attempt - 1), 60.0)
        if seconds > LONGEST_WAIT:
            raise HubError(f"{self.repo}: {doing}: the Hub asks to wait {seconds:.0f} s; run the same command then")
        what = "the connection broke" if status is None else f"the Hub answered {status}"
        tqdm.write(f"{self.repo}: {doing}: {what}; trying again in {seconds:.0f} s", file=sys.stderr)
        sleep(seconds)

    def _explain(self, error: Exception, status: int | None, passing: bool, doing: str) -> HubError:
        said = redact(str(error), self.token)
        where = f"{self.repo}: {doing}"
        if status == 401:
            return HubError(
                f"{where}: the Hub does not accept the token (401), or the repository is private and none was given; "
                "set HF_TOKEN to a valid token or run `hf auth login`. A second try alone cannot help"
            )
        if status == 403:
            return HubError(
                f"{where}: the token lacks a permission (403); use one that may write to this repository. "
                f"A second try alone cannot help. The Hub said: {said}"
            )
        if status == 404:
            return HubError(f"{where}: not found (404); check the name and the revision. The Hub said: {said}")
        if status in CONFLICTS:
            return Conflict(f"{where}: somebody else changed the repository meanwhile ({status}): {said}")
        if passing:
            what = f"{self.api.endpoint} could not be reached" if status is None else f"the Hub kept answering {status}"
            return HubError(f"{where}: {what}; run the same command again later, it resumes. What was said: {said}")
        return HubError(f"{where}: the Hub refused it{f' ({status})' if status else ''}: {said}")

    def require_storage(self) -> None:
        """Raises HubError where the client would upload through Xet to a Hub that has none."""
        if constants.HF_HUB_DISABLE_XET or importlib.util.find_spec("hf_xet") is None:
            return
        address = f"{self.api.endpoint}/api/datasets/{self.repo}/xet-write-token/{constants.DEFAULT_REVISION}"

        def ask_for_token() -> bool:
            response = get_session().get(address, headers=build_hf_headers())
            if response.status_code == 404:
                return False
            hf_raise_for_status(response)
            return True

        if not self.call("asking for Xet storage", ask_for_token):
            raise HubError(
                f"{self.repo}: the Hub at {self.api.endpoint} has no Xet storage; "
                "set HF_HUB_DISABLE_XET=1 to upload without it, and run the same command again"
            )

    def revision(self, revision: str | None = None) -> Revision | None:
        """A revision (main by default) with its files; None where the repository or the revision does not exist."""

        def read() -> Revision | None:
            try:
                info = self.api.dataset_info(self.repo, revision=revision)
            except (RepositoryNotFoundError, RevisionNotFoundError) as error:
                # The Hub answers 401 for an unknown repository too, but only where no valid token came along.
                if error.response.status_code == 404 or self.token is None:
                    return None
                raise
            commit = str(info.sha)
            tree = self.api.list_repo_tree(self.repo, revision=commit, recursive=True, repo_type="dataset")
            files = {entry.path: _remote_file(entry) for entry in tree if isinstance(entry, RepoFile)}
            own = {name: file for name, file in files.items() if name not in HUB_OWN_FILES}
            return Revision(commit, bool(info.private), own)

        return self.call(f"reading {revision or 'main'}", read)

    def files(self) -> HfFileSystem:
        """The repository's contents as files, read by ranges or streamed; nothing is cached on disk."""
        return HfFileSystem(endpoint=self.api.endpoint, skip_instance_cache=True)

    def address(self, revision: Revision, name: str) -> str:
        """A file's path in `files()`."""
        return f"datasets/{self.repo}@{revision.commit}/{name}"


def _remote_file(entry: RepoFile) -> RemoteFile:
    return RemoteFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)


def _http_error(error: BaseException | None) -> HTTPError | None:
    """The HTTP error behind an error, if any: the Hub's answer, or a request that was lost on the way."""
    while error is not None and not isinstance(error, HTTPError):
        error = error.__cause__
    return error


def _never_connected(error: BaseException | None) -> bool:
    """Tell whether the Hub's name was not found or nothing listened there, by the causes that any client keeps."""
    while error is not None and not isinstance(error, socket.gaierror | ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


def _retry_after(answer: HfHubHTTPError) -> float | None:
    """Seconds that the Hub asks to wait, by `Retry-After` (a number or a date) or its own `RateLimit` header."""
    value = answer.response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        pass  # nothing, or nothing that can be understood
    else:
        return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    limit = re.search(r";\s*r=0\s*;\s*t=(\d+)", answer.response.headers.get("RateLimit", ""))
    return float(limit[1]) if limit else None
