"""The Hub's HTTP interface over the repositories of a Store: what each address answers."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import PurePosixPath
from urllib.parse import parse_qs, unquote

import yaml
from loopback_repository import Blob, Commit, Conflict, Repository, Store

USER = "user"
"""The namespace of a repository that is created by its bare name."""


@dataclass(frozen=True)
class Question:
    """A request as it came in; `path` still quoted, so that a slash inside a revision is told from a separator."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers.items() if key.lower() == name.lower()), None)

    def json(self) -> dict:
        return json.loads(self.body)

    def form(self) -> dict[str, list[str]]:
        """The fields of a form-encoded or a JSON body, each as a list."""
        if "json" in (self.header("Content-Type") or ""):
            return {key: value if isinstance(value, list) else [value] for key, value in self.json().items()}
        return parse_qs(self.body.decode())


@dataclass(frozen=True)
class Answer:
    """Status, headers and body of a response."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def reply(content: object, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> Answer:
    """A JSON answer."""
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})


def refusal(status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None) -> Answer:
    """An error as the Hub says it: in the body and in headers."""
    named = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | dict(headers or {})
    return reply({"error": message}, status, named)


class Refused(Exception):
    """Ends the work on a request with this answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


class Api:
    """Answers requests. `tokens` maps a token to its role, "read" or "write"."""

    def __init__(self, store: Store, tokens: Mapping[str, str], page_size: int) -> None:
        self.store = store
        self.tokens = tokens
        self.page_size = page_size
        self.url = ""
        repo = r"(?P<repo>[^/]+/[^/]+)"
        self.routes: list[tuple[str, re.Pattern[str], Callable[..., Answer]]] = [
            ("POST", re.compile(r"/api/repos/create"), self.create),
            ("GET", re.compile(r"/api/whoami-v2"), self.whoami),
            ("POST", re.compile(r"/api/validate-yaml"), self.validate_card),
            ("GET", re.compile(rf"/api/datasets/{repo}"), self.info),
            ("GET", re.compile(rf"/api/datasets/{repo}/revision/(?P<revision>[^/]+)"), self.info),
            ("GET", re.compile(rf"/api/datasets/{repo}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?"), self.tree),
            ("GET", re.compile(rf"/api/datasets/{repo}/refs"), self.refs),
            ("GET", re.compile(rf"/api/datasets/{repo}/xet-(?:read|write)-token/[^/]+"), self.no_xet),
            ("POST", re.compile(rf"/api/datasets/{repo}/paths-info/(?P<revision>[^/]+)"), self.paths_info),
            ("POST", re.compile(rf"/api/datasets/{repo}/preupload/(?P<revision>[^/]+)"), self.preupload),
            ("POST", re.compile(rf"/api/datasets/{repo}/commit/(?P<revision>[^/]+)"), self.commit),
            ("POST", re.compile(rf"/api/datasets/{repo}/tag/(?P<revision>[^/]+)"), self.tag),
            ("POST", re.compile(rf"/datasets/{repo}\.git/info/lfs/objects/batch"), self.lfs_batch),
            ("POST", re.compile(rf"/datasets/{repo}\.git/info/lfs/verify"), self.lfs_verify),
            ("PUT", re.compile(r"/lfs/(?P<oid>[0-9a-f]{64})"), self.lfs_put),
            ("*", re.compile(rf"/datasets/{repo}/resolve/(?P<revision>[^/]+)/(?P<file>.+)"), self.resolve),
        ]

    def answer(self, question: Question) -> Answer | None:
        """The answer, or None for an address that no route knows."""
        for method, pattern, serve in self.routes:
            match = pattern.fullmatch(question.path)
            if match and (method == question.method or (method == "*" and question.method in ("GET", "HEAD"))):
                try:
                    self._check_token(question, writes=question.method == "POST" and serve != self.paths_info)
                    return serve(
                        question, **{key: value and unquote(value) for key, value in match.groupdict().items()}
                    )
                except Refused as refused:
                    return refused.answer
        return None

    def _role(self, question: Question) -> str | None:
        token = (question.header("Authorization") or "").removeprefix("Bearer ")
        return self.tokens.get(token)

    def _check_token(self, question: Question, writes: bool) -> None:
        role = self._role(question)
        if question.header("Authorization") and role is None:
            raise Refused(refusal(HTTPStatus.UNAUTHORIZED, "Invalid credentials in Authorization header"))
        if writes and role is None:
            raise Refused(refusal(HTTPStatus.UNAUTHORIZED, "Invalid username or password."))
        if writes and role != "write":
            raise Refused(refusal(HTTPStatus.FORBIDDEN, "This token has no write permission"))

    def _repository(self, question: Question, repo: str) -> Repository:
        repository = self.store.repositories.get(repo)
        role = self._role(question)
        if repository is None or (repository.private and role is None):
            status = HTTPStatus.UNAUTHORIZED if role is None else HTTPStatus.NOT_FOUND
            raise Refused(refusal(status, "Repository not found", "RepoNotFound"))
        return repository

    def _commit(self, question: Question, repo: str, revision: str | None) -> Commit:
        commit = self._repository(question, repo).resolve(revision or "main")
        if commit is None:
            raise Refused(refusal(HTTPStatus.NOT_FOUND, f"Invalid rev id: {revision}", "RevisionNotFound"))
        return commit

    def create(self, question: Question) -> Answer:
        wanted = question.json()
        repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
        where = {"url": f"{self.url}/datasets/{repo_id}", "name": repo_id}
        if repo_id in self.store.repositories:
            message = "You already created this dataset repo"
            return reply({"error": message, **where}, HTTPStatus.CONFLICT, {"X-Error-Message": message})
        private = wanted.get("visibility") == "private" or wanted.get("private") is True
        self.store.create(repo_id, private)
        return reply(where)

    def whoami(self, question: Question) -> Answer:
        if self._role(question) is None:
            return refusal(HTTPStatus.UNAUTHORIZED, "Invalid username or password.")
        return reply({"type": "user", "name": USER, "orgs": []})

    def validate_card(self, question: Question) -> Answer:
        header = re.match(r"---\n(.*?)\n---\n", question.json()["content"], re.DOTALL)
        if header is None:
            return reply({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
        try:
            yaml.safe_load(header[1])
        except yaml.YAMLError as error:
            return reply({"errors": [{"message": str(error)}], "warnings": []}, HTTPStatus.BAD_REQUEST)
        return reply({"errors": [], "warnings": []})

    def info(self, question: Question, repo: str, revision: str | None = None) -> Answer:
        repository, commit = self._repository(question, repo), self._commit(question, repo, revision)
        date = "2025-01-01T00:00:00.000Z"
        return reply(
            {
                "_id": hashlib.sha1(repo.encode()).hexdigest()[:24],
                "id": repo,
                "author": repo.split("/")[0],
                "sha": commit.oid,
                "private": repository.private,
                "gated": False,
                "disabled": False,
                "lastModified": date,
                "createdAt": date,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": [{"rfilename": path} for path in sorted(commit.files)],
            }
        )

    def tree(self, question: Question, repo: str, revision: str, folder: str | None) -> Answer:
        commit = self._commit(question, repo, revision)
        query = parse_qs(question.query)
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = _listing(commit, folder or "", recursive)
        if folder and not entries:
            raise Refused(refusal(HTTPStatus.NOT_FOUND, f"{folder} does not exist on {revision}", "EntryNotFound"))
        start = int(query.get("cursor", ["0"])[0])
        end = start + self.page_size
        more = f"{self.url}{question.path}?recursive={str(recursive).lower()}&cursor={end}"
        return reply(entries[start:end], headers={"Link": f'<{more}>; rel="next"'} if end < len(entries) else {})

    def refs(self, question: Question, repo: str) -> Answer:
        repository = self._repository(question, repo)
        main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.head.oid}
        tags = [{"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": oid} for tag, oid in repository.tags.items()]
        return reply({"branches": [main], "converts": [], "tags": tags})

    def no_xet(self, question: Question, repo: str) -> Answer:
        return refusal(HTTPStatus.NOT_FOUND, "this Hub has no Xet storage")

    def paths_info(self, question: Question, repo: str, revision: str) -> Answer:
        commit = self._commit(question, repo, revision)
        wanted = question.form().get("paths", [])
        return reply([entry for entry in _listing(commit, "", recursive=True) if entry["path"] in wanted])

    def preupload(self, question: Question, repo: str, revision: str) -> Answer:
        commit = self._commit(question, repo, revision)
        answers = []
        for file in question.json()["files"]:
            known = commit.files.get(file["path"])
            large = self.store.is_large(file["path"], file["size"])
            mode = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            answers.append(mode | ({"oid": known.etag} if known else {}))
        return reply({"files": answers})

    def lfs_batch(self, question: Question, repo: str) -> Answer:
        self._repository(question, repo)
        answers = []
        for wanted in question.json()["objects"]:
            actions = {
                "upload": {"href": f"{self.url}/lfs/{wanted['oid']}"},
                "verify": {"href": f"{self.url}/datasets/{repo}.git/info/lfs/verify"},
            }
            answers.append(wanted | ({} if wanted["oid"] in self.store.objects else {"actions": actions}))
        return reply({"transfer": "basic", "objects": answers})

    def lfs_put(self, question: Question, oid: str) -> Answer:
        if hashlib.sha256(question.body).hexdigest() != oid:
            return refusal(HTTPStatus.BAD_REQUEST, "the content does not have the digest of its name")
        self.store.objects[oid] = question.body
        return Answer(HTTPStatus.OK)

    def lfs_verify(self, question: Question, repo: str) -> Answer:
        wanted = question.json()
        if len(self.store.objects.get(wanted["oid"], b"")) != wanted["size"]:
            return refusal(HTTPStatus.NOT_FOUND, "the object was not uploaded")
        return reply({})

    def commit(self, question: Question, repo: str, revision: str) -> Answer:
        repository = self._repository(question, repo)
        header: dict = {}
        add: dict[str, Blob] = {}
        delete: list[str] = []
        for line in question.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                header = value
            elif item["key"] == "file":
                add[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.store.objects:
                    return refusal(HTTPStatus.BAD_REQUEST, f"LFS pointer of {value['path']} points to nothing")
                add[value["path"]] = Blob(self.store.objects[value["oid"]], lfs=True)
            else:
                delete.append(value["path"].rstrip("/") + ("/" if item["key"] == "deletedFolder" else ""))
        try:
            commit = repository.commit(add, delete, header.get("parentCommit"), header["summary"])
        except Conflict:
            message = "A commit has happened since. Please refresh and try again."
            return refusal(HTTPStatus.PRECONDITION_FAILED, message)
        except KeyError as missing:
            return refusal(HTTPStatus.NOT_FOUND, f"A file with this name doesn't exist: {missing}", "EntryNotFound")
        url = f"{self.url}/datasets/{repo}/commit/{commit.oid}"
        return reply({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})

    def tag(self, question: Question, repo: str, revision: str) -> Answer:
        repository, commit = self._repository(question, repo), self._commit(question, repo, revision)
        tag = question.json()["tag"]
        if tag in repository.tags:
            return refusal(HTTPStatus.CONFLICT, f"Tag reference exists already: {tag}")
        repository.tags[tag] = commit.oid
        return reply({})

    def resolve(self, question: Question, repo: str, revision: str, file: str) -> Answer:
        commit = self._commit(question, repo, revision)
        blob = commit.files.get(file)
        about = {"X-Repo-Commit": commit.oid}
        if blob is None:
            return refusal(HTTPStatus.NOT_FOUND, "Entry not found", "EntryNotFound", about)
        about |= {"ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if blob.lfs:
            about |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data))}
        return _part(blob.data, question.header("Range"), about)


def _listing(commit: Commit, folder: str, recursive: bool) -> list[dict]:
    """The entries under a folder, sorted by path: files, and the folders above them."""
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict] = {}
    for path, blob in commit.files.items():
        if not path.startswith(prefix):
            continue
        for parent in PurePosixPath(path.removeprefix(prefix)).parents:
            if str(parent) != ".":
                oid = hashlib.sha1(f"{commit.oid} {parent}".encode()).hexdigest()
                name = prefix + str(parent)
                entries[name] = {"type": "directory", "oid": oid, "size": 0, "path": name}
        entries[path] = {"type": "file", "oid": blob.git_oid, "size": len(blob.data), "path": path}
        if blob.lfs:
            entries[path]["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": len(blob.pointer)}
    return [entry for path, entry in sorted(entries.items()) if recursive or "/" not in path.removeprefix(prefix)]


def _part(data: bytes, asked: str | None, headers: dict[str, str]) -> Answer:
    """The whole content, or the part that a Range header names."""
    if asked is None:
        return Answer(HTTPStatus.OK, data, headers)
    bounds = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
    if bounds is None:
        return refusal(HTTPStatus.BAD_REQUEST, f"this Hub cannot read the range {asked}")
    first, last = bounds[1], bounds[2]
    start = int(first) if first else max(0, len(data) - int(last))
    end = min(int(last), len(data) - 1) if first and last else len(data) - 1
    if start >= len(data):
        outside = {"Content-Range": f"bytes */{len(data)}"}
        return Answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"", headers | outside)
    return Answer(
        HTTPStatus.PARTIAL_CONTENT,
        data[start : end + 1],
        headers | {"Content-Range": f"bytes {start}-{end}/{len(data)}"},
    )
