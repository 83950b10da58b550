"""A Hugging Face Hub on 127.0.0.1 for tests: dataset repositories in memory, served to the real client libraries.

    with LoopbackHub(tmp_path) as hub:
        hub.upload("user/zoo", folder)
        hub.run("import json; ...; print(json.dumps(result))")  # with the variables of hub.environment()
        hub.counters.sent(file="mnist/*")          # bytes of response bodies, by file of the repository
        hub.faults.append(Fault("POST", "*/commit/*", status=412))

The endpoints are those that `huggingface_hub` and `datasets` call to create, upload (plain LFS, no Xet), commit, tag,
list and read a dataset. Answers, error codes and headers follow the client's expectations. Whatever the server does not
know is answered with 404 and kept in `hub.unknown`, so that a test can see that nothing went unserved.
"""

import fnmatch
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest
from loopback_api import Answer, Api, Question, refusal
from loopback_repository import Repository, Store

_BLOCK = 2**16
WRITE_TOKEN = "hf_loopbackwritetokenloopbackwritetoken"
READ_TOKEN = "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"


@dataclass
class Fault:
    """One injected fault, for the requests whose method and path (unquoted, without query) match the patterns.

    Without `status` or a cut the request is served as usual, after `delay` and `before`.
    """

    method: str = "*"
    path: str = "*"
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = "injected fault"
    times: int | None = 1
    """How many matching requests fail; None: all of them."""
    skip: int = 0
    """How many matching requests pass unharmed first."""
    delay: float = 0.0
    """Seconds to wait before the answer."""
    before: Callable[[], object] | None = None
    """Called before the request is served; a concurrent publisher, say."""
    cut_request: int | None = None
    """Close the connection after this many bytes of the request's body; the request is not served."""
    cut_response: int | None = None
    """Serve the request, then close the connection after this many bytes of the answer's body (0: no answer at all)."""

    def claims(self, method: str, path: str) -> bool:
        """Whether this fault strikes this request; counts `skip` and `times` down."""
        if self.times == 0 or not (fnmatch.fnmatch(method, self.method) and fnmatch.fnmatch(path, self.path)):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass
class Exchange:
    """One request and its answer, counted as they pass; bytes are those of the bodies on the wire."""

    method: str
    path: str
    file: str | None
    """The file of the repository that was read (`resolve`), if any."""
    status: int = 0
    received: int = 0
    sent: int = 0


class Counters:
    """Every exchange since the start or the last `reset`, and sums over those that match patterns."""

    def __init__(self) -> None:
        self._exchanges: list[Exchange] = []
        self._lock = threading.Lock()

    def add(self, exchange: Exchange) -> None:
        with self._lock:
            self._exchanges.append(exchange)

    def reset(self) -> None:
        with self._lock:
            self._exchanges.clear()

    def exchanges(self, method: str = "*", path: str = "*", file: str | None = None) -> list[Exchange]:
        """The exchanges of this method, URL path and, if given, file of the repository (shell patterns)."""
        with self._lock:
            return [
                exchange
                for exchange in self._exchanges
                if fnmatch.fnmatch(exchange.method, method)
                and fnmatch.fnmatch(exchange.path, path)
                and (file is None or (exchange.file is not None and fnmatch.fnmatch(exchange.file, file)))
            ]

    def requests(self, method: str = "*", path: str = "*", file: str | None = None) -> int:
        """How many requests match."""
        return len(self.exchanges(method, path, file))

    def received(self, method: str = "*", path: str = "*") -> int:
        """Bytes uploaded in the bodies of the requests that match."""
        return sum(exchange.received for exchange in self.exchanges(method, path))

    def sent(self, method: str = "*", path: str = "*", file: str | None = None) -> int:
        """Bytes downloaded in the bodies of the answers that match."""
        return sum(exchange.sent for exchange in self.exchanges(method, path, file))

    def sent_by_file(self) -> dict[str, int]:
        """Bytes downloaded of each file of the repositories."""
        sums: dict[str, int] = {}
        for exchange in self.exchanges(file="*"):
            sums[str(exchange.file)] = sums.get(str(exchange.file), 0) + exchange.sent
        return sums


class LoopbackHub:
    """The Hub as a context manager. `home` is where clients keep caches (`HF_HOME`), never the user's own."""

    def __init__(self, home: Path, lfs_above: int = 10 * 2**20, page_size: int = 1000) -> None:
        self.home = home
        self.store = Store(lfs_above)
        self.counters = Counters()
        self.faults: list[Fault] = []
        self.unknown: list[str] = []
        self.api = Api(self.store, {WRITE_TOKEN: "write", READ_TOKEN: "read"}, page_size)
        self._fault_lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler_of(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.api.url = self.url

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, token: str | None = WRITE_TOKEN) -> dict[str, str]:
        """Variables for a client in another process; they must be set before it imports `huggingface_hub`."""
        variables = {
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }
        return variables if token is None else {**variables, "HF_TOKEN": token}

    def run(self, program: str, *arguments: str, token: str | None = WRITE_TOKEN) -> Any:
        """What a Python program prints last, as JSON, in a process of its own whose libraries know only this Hub."""
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, **self.environment(token)},
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.fail(f"the program ended with {done.returncode}:\n{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    def connect(self, monkeypatch: pytest.MonkeyPatch, token: str | None = WRITE_TOKEN) -> None:
        """Points `huggingface_hub` in this process, imported already, at this Hub until the test ends."""
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(self.home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(self.home / "token"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        if token is None:
            monkeypatch.delenv("HF_TOKEN", raising=False)
        else:
            monkeypatch.setenv("HF_TOKEN", token)

    def upload(self, repo_id: str, folder: Path, private: bool = False) -> str:
        """Puts a folder's files into a repository directly, past the protocol; the new commit's id."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.put(repo_id, files, private=private)

    def put(self, repo_id: str, files: Mapping[str, bytes], delete: tuple[str, ...] = (), private: bool = False) -> str:
        """Commits files directly, past the protocol, as another publisher would; the new commit's id."""
        repository = self.store.repositories.get(repo_id) or self.store.create(repo_id, private)
        return repository.commit({path: self.store.blob(path, data) for path, data in files.items()}, delete).oid

    def repository(self, repo_id: str) -> Repository:
        """The repository as the server keeps it."""
        return self.store.repositories[repo_id]

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """A revision's content without `.gitattributes`, which the Hub itself makes."""
        tree = self.repository(repo_id).resolve(revision)
        if tree is None:
            raise KeyError(revision)
        return {path: blob.data for path, blob in tree.files.items() if path != ".gitattributes"}

    def commits(self, repo_id: str) -> int:
        """How many commits were made, beside the one with which the Hub begins a repository."""
        return len(self.repository(repo_id).commits) - 1

    def fault_for(self, method: str, path: str) -> Fault | None:
        """The first injected fault that strikes this request."""
        with self._fault_lock:
            return next((fault for fault in self.faults if fault.claims(method, path)), None)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent where a client went away, as interrupted ones do; anything else is an error of the server."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Cut(Exception):
    """The connection ends here, on purpose."""


def _handler_of(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
    """The request handler class of one Hub: reads bodies, strikes faults, counts bytes, leaves answers to the Api."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def serve(self) -> None:
            target = urlsplit(self.path)
            path = unquote(target.path)
            file = re.match(r"/datasets/[^/]+/[^/]+/resolve/[^/]+/(.+)", target.path)
            self.exchange = Exchange(self.command, path, unquote(file[1]) if file else None)
            hub.counters.add(self.exchange)
            fault = hub.fault_for(self.command, path)
            try:
                body = self.read_body(fault.cut_request if fault else None)
                question = Question(self.command, target.path, target.query, dict(self.headers.items()), body)
                self.write(self.answer(question, fault), fault.cut_response if fault else None)
            except (_Cut, ConnectionError):
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve

        def answer(self, question: Question, fault: Fault | None) -> Answer:
            if fault is not None:
                time.sleep(fault.delay)
                if fault.before is not None:
                    fault.before()
                if fault.status is not None:
                    return refusal(fault.status, fault.message, headers=fault.headers)
            answer = hub.api.answer(question)
            if answer is None:
                hub.unknown.append(f"{question.method} {self.path}")
                answer = refusal(HTTPStatus.NOT_FOUND, "this Hub does not know that address")
            return answer

        def read_body(self, cut: int | None) -> bytes:
            body = bytearray()
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.read_exactly(size, None if cut is None else cut - len(body))
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body += self.read_exactly(int(self.headers.get("Content-Length", 0)), cut)
            if cut is not None:
                raise _Cut
            return bytes(body)

        def read_exactly(self, size: int, cut: int | None) -> bytes:
            wanted = size if cut is None else min(size, cut)
            data = self.rfile.read(wanted)
            self.exchange.received += len(data)
            if len(data) < size:
                raise _Cut
            return data

        def write(self, answer: Answer, cut: int | None) -> None:
            if cut == 0:
                raise _Cut
            self.exchange.status = answer.status
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            body = answer.body[:cut] if self.command != "HEAD" else b""
            for start in range(0, len(body), _BLOCK):
                block = body[start : start + _BLOCK]
                # Counted before it goes out: whoever has read an answer finds it counted.
                self.exchange.sent += len(block)
                self.wfile.write(block)
            self.wfile.flush()
            if cut is not None:
                raise _Cut

        def log_message(self, format: str, *args: Any) -> None:
            """Silent: tests read the counters."""

    return Handler
