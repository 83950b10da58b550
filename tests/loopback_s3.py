"""An S3 server on this machine's loopback, counted and with faults: moto's server behind a proxy that can refuse."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from moto.server import ThreadedMotoServer

BUCKET = "zoo-bucket"


@dataclass
class Fault:
    """What happens to the next `times` requests of `method` whose path contains `part`.

    status: answered instead of the server's answer. after: the server does its work before the answer is replaced.
    seconds: of delay. drop: the connection is closed without an answer.
    """

    method: str
    part: str
    status: int | None = None
    code: str = "SlowDown"
    after: bool = False
    seconds: float = 0.0
    drop: bool = False
    times: int = 1


@dataclass
class LoopbackS3:
    url: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, method: str, path: str) -> Fault | None:
        with self.lock:
            self.requests.append((method, path))
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and fault.part in path:
                    fault.times -= 1
                    return fault
        return None


@contextmanager
def loopback_s3() -> Iterator[LoopbackS3]:
    """Serve S3 with one bucket on 127.0.0.1 while the block runs."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    proxy.daemon_threads = True
    proxy.upstream = (host, port)  # type: ignore[attr-defined]
    proxy.s3 = s3 = LoopbackS3(f"http://127.0.0.1:{proxy.server_address[1]}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    connection = HTTPConnection(host, port)
    connection.request("PUT", f"/{BUCKET}")
    assert connection.getresponse().status == 200
    try:
        yield s3
    finally:
        proxy.shutdown()
        proxy.server_close()
        moto.stop()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True  # head and body in one packet: a delayed acknowledgement would cost 40 ms a request

    def _serve(self) -> None:
        server = self.server
        fault = server.s3.take(self.command, self.path)  # type: ignore[attr-defined]
        body = self._body()
        if fault:
            time.sleep(fault.seconds)
        if fault and fault.drop and not fault.after:
            self.close_connection = True
            return None
        if fault and fault.status and not fault.after:
            return self._refuse(fault)
        connection = HTTPConnection(*server.upstream)  # type: ignore[attr-defined]
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("expect", "transfer-encoding")}
        connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if fault and fault.drop:
            self.close_connection = True
            return None
        if fault and fault.status:
            return self._refuse(fault)
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        self.wfile.write(content)
        return None

    def _body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
            self.wfile.flush()
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _refuse(self, fault: Fault) -> None:
        content = f"<Error><Code>{fault.code}</Code><Message>on order</Message></Error>".encode()
        self.send_response(fault.status or 503)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean."""
