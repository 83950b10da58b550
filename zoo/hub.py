"""Publishing a dataset folder to the Hugging Face Hub.

What can be relied on: main moves from one consistent dataset to the next. Contents are uploaded first, where nobody
sees them; a single commit then adds, changes and deletes, and names the parent that it was planned on, so that it
fails as a whole where somebody else was faster. An interruption at any point leaves main consistent, and the next run
uploads only what the Hub does not have yet. The same content makes no commit.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from tqdm import tqdm

from zoo.errors import DatasetError, HubError
from zoo.hub_check import verify_repository
from zoo.hub_folder import CARD, CHECKSUMS, Folder, read_folder, refuse_secrets
from zoo.hub_plan import Step, differences, plan_steps
from zoo.hub_session import Conflict, Revision, Session

__all__ = ["PublishReport", "publish", "verify_repository"]

CONFLICT_ATTEMPTS = 5
"""How often a publication is planned anew because somebody else committed meanwhile."""
UPLOADS_AT_ONCE = 5


@dataclass(frozen=True)
class PublishReport:
    """What a publication did, or with `dry_run` would do."""

    repo: str
    url: str
    commit: str | None
    """The commit of main that holds the dataset; None in a dry run with changes."""
    created: bool
    """Whether the repository is new."""
    commits: list[str]
    """The commits made, oldest first; empty where the repository had this content already."""
    added: list[str]
    """Files that are new or changed, compared with main as it was found."""
    added_bytes: int
    deleted: list[str]
    unlisted: list[str]
    """Files of the folder that SHA256SUMS does not list and that were therefore left out."""
    tag: str | None
    dry_run: bool


def publish(
    folder: Path | str,
    repo: str,
    *,
    private: bool = False,
    tag: str | None = None,
    dry_run: bool = False,
    verify: Callable[[Path], list[str]] | None = None,
) -> PublishReport:
    """Makes main of the dataset repository `user/name` equal to what the folder's SHA256SUMS lists, then tags it.

    Rows are not checked unless `verify` is given, a function that returns the problems of the local folder, such as
    `zoo.verify`; any problem ends the publication before anything is sent. With `dry_run` nothing is written. The token
    is the environment's (HF_TOKEN) or the one `hf auth login` left behind.

    Raises DatasetError where the folder cannot be published (no SHA256SUMS, links, hidden files, secrets in a text,
    problems) and HubError where the Hub refuses (401, 403, another visibility than `private` asks for, a tag that
    marks another commit, no Xet storage) or stays unreachable; the message says whether a second try can help.
    """
    folder = Path(folder)
    content = read_folder(folder)
    if problems := verify(folder) if verify else []:
        raise DatasetError(
            f"{folder}: not published, as its verification found {len(problems)} problem(s): {'; '.join(problems[:3])}"
        )
    session = Session(repo)
    refuse_secrets(content.files.values(), session.token)
    if tag is not None and not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", tag):
        raise HubError(f"tag {tag!r}: expected a name such as v1.0.0 (letters, digits, '.', '_', '+', '-')")
    if not dry_run:
        session.require_token()
    main = session.revision()
    created = main is None
    if main is None:
        main = _new_repository(session, private, dry_run)
    if main.private != private:
        raise HubError(
            f"{repo}: found a {_visibility(main.private)} repository, expected a {_visibility(private)} one; change it "
            f"in its settings, or {'leave out' if private else 'give'} --private. Nothing was sent"
        )
    steps = _plan(session, content, main)
    if tag is not None and steps and not created and (marked := _tagged_commit(session, tag)):
        raise _tag_taken(repo, tag, marked)
    commit: str | None = None if steps else main.commit
    commits: list[str] = []
    if not dry_run:
        if steps:
            commit, commits = _carry_out(session, content, main, steps)
            _compare(session, content, commit)
        if tag is not None:
            _tag(session, tag, commit or main.commit)
    added = sorted({name for step in steps for name in step.add})
    return PublishReport(
        repo=repo,
        url=f"{session.api.endpoint}/datasets/{repo}",
        commit=commit,
        created=created,
        commits=commits,
        added=added,
        added_bytes=sum(content.files[name].size for name in added),
        deleted=[name for step in steps for name in step.delete],
        unlisted=content.unlisted,
        tag=tag,
        dry_run=dry_run,
    )


def _visibility(private: bool) -> str:
    return "private" if private else "public"


def _new_repository(session: Session, private: bool, dry_run: bool) -> Revision:
    """Creates the repository and returns its first revision; a dry run imagines an empty one."""
    if dry_run:
        return Revision(commit="", private=private, files={})
    create = partial(session.api.create_repo, session.repo, repo_type="dataset", private=private, exist_ok=True)
    session.call("creating the repository", create)
    return _existing_main(session)


def _existing_main(session: Session) -> Revision:
    main = session.revision()
    if main is None:
        raise HubError(f"{session.repo}: was there a moment ago, but not now; run the same command again")
    return main


def _plan(session: Session, content: Folder, main: Revision) -> list[Step]:
    """The commits that lead from main to the folder's content; none where they are equal."""
    if not differences(content.files, main):
        return []
    card = ""
    if CARD in main.files:
        address = session.address(main, CARD)
        card = session.call("reading the card", lambda: session.files().read_bytes(address)).decode(errors="replace")
    return plan_steps(session.repo, content, main, card)


def _carry_out(session: Session, content: Folder, main: Revision, steps: list[Step]) -> tuple[str, list[str]]:
    """Uploads and commits the steps, planning anew where main has moved: main's commit then, and the commits made."""
    session.require_storage()
    commits: list[str] = []
    for _ in range(CONFLICT_ATTEMPTS):
        parent = main.commit
        try:
            for step, additions in zip(steps, _upload(session, content, steps), strict=True):
                parent = _commit(session, step, additions, parent)
                commits.append(parent)
            return parent, commits
        except Conflict:
            # Also after a commit whose answer was lost: then main is what it should be, and no step is left.
            main = _existing_main(session)
            steps = _plan(session, content, main)
    raise HubError(
        f"{session.repo}: somebody else committed during each of {CONFLICT_ATTEMPTS} attempts; "
        "run the same command again when they are done, it resumes"
    )


def _upload(session: Session, content: Folder, steps: list[Step]) -> list[list[CommitOperationAdd]]:
    """Sends the contents of all steps that the Hub lacks, to where no revision shows them yet.

    Raises DatasetError where a file is no longer what SHA256SUMS says.
    """
    uploads = [[CommitOperationAdd(name, source) for name, source in step.add.items()] for step in steps]
    additions = [addition for upload in uploads for addition in upload]
    total = sum(addition.upload_info.size for addition in additions)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"upload to {session.repo}") as bar:
        for start in range(0, len(additions), UPLOADS_AT_ONCE):
            group = additions[start : start + UPLOADS_AT_ONCE]
            send = partial(session.api.preupload_lfs_files, session.repo, group, repo_type="dataset", free_memory=False)
            session.call("uploading", send, patient=False)
            for addition in group:
                recorded = content.files[addition.path_in_repo]
                changed = addition.upload_info.sha256.hex() != recorded.sha256
                if changed and not isinstance(addition.path_or_fileobj, bytes):
                    raise DatasetError(
                        f"{recorded.path}: differs from its digest in {CHECKSUMS}; run `zoo build` again"
                    )
                bar.update(addition.upload_info.size)
    return uploads


def _commit(session: Session, step: Step, additions: list[CommitOperationAdd], parent: str) -> str:
    """Makes one commit on main if that still is at `parent`, else raises Conflict; the new commit's id."""
    deletions = [CommitOperationDelete(name, is_folder=False) for name in step.delete]
    request = partial(
        session.api.create_commit,
        session.repo,
        [*additions, *deletions],
        commit_message=step.title,
        repo_type="dataset",
        revision="main",
        parent_commit=parent,
    )
    # Made again after a lost answer, it cannot commit twice: its parent is no longer main's head then.
    return session.call("committing", request).oid


def _compare(session: Session, content: Folder, commit: str) -> None:
    """Raises HubError where the published commit is not what the folder holds."""
    published = session.revision(commit)
    wrong = differences(content.files, published) if published else list(content.files)
    if wrong:
        raise HubError(
            f"{session.repo}: commit {commit} differs from the folder in {len(wrong)} file(s) "
            f"({', '.join(wrong[:3])}); run the same command again"
        )


def _tagged_commit(session: Session, tag: str) -> str | None:
    """The commit that a tag marks, or None where there is no such tag."""
    refs = session.call("reading the tags", lambda: session.api.list_repo_refs(session.repo, repo_type="dataset"))
    if all(known.name != tag for known in refs.tags):
        return None
    # Not the ref's own target: for an annotated tag that may be the tag object instead of the commit.
    return session.call("reading the tag", lambda: session.api.dataset_info(session.repo, revision=tag)).sha


def _tag_taken(repo: str, tag: str, commit: str) -> HubError:
    return HubError(f"{repo}: tag {tag} marks another version already (commit {commit}); choose another name")


def _tag(session: Session, tag: str, commit: str) -> None:
    """Marks the commit; raises HubError where the tag marks another one. An equal tag is left as it is."""
    marked = _tagged_commit(session, tag)
    if marked is None:
        create = partial(
            session.api.create_tag, session.repo, tag=tag, revision=commit, repo_type="dataset", exist_ok=True
        )
        session.call(f"tagging {tag}", create)
        marked = _tagged_commit(session, tag)
    if marked != commit:
        raise _tag_taken(session.repo, tag, str(marked))
