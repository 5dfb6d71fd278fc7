"""An S3 server in a process of its own, on loopback, that can be told to fail: moto behind a thin layer.

    with S3Server() as server:
        run_ranks(2, fn, f"s3://{server.bucket}/run", environment=server.environment)
        server.fail(method="PUT", query="partNumber", times=2, status=503)
        server.requests()        # every request since the start
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

CUT = -1
_CONTROL = "/_test/"


class S3Server:
    """The server's process. environment: what a client's process needs to find it."""

    bucket = "checkpoints"

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._port = 0

    def __enter__(self) -> S3Server:
        self._start()
        self._call("PUT", f"/{self.bucket}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def fail(self, *, times: int = 10**9, status: int = 503, method: str = "", query: str = "", key: str = "") -> None:
        """Answer so many of the coming requests with an error: those of a method, whose query and key hold some text.

        status 0: close the connection without an answer; CUT: after half of the answer.
        """
        fail_at(f"http://127.0.0.1:{self._port}", times=times, status=status, method=method, query=query, key=key)

    def behave(self) -> None:
        """Answer everything again, and forget what was asked."""
        self._call("POST", _CONTROL + "behave", b"")

    def requests(self) -> list[dict[str, Any]]:
        """Every request since `behave`: method, key, query, range, status, sent (bytes of the answer)."""
        found: list[dict[str, Any]] = json.loads(self._call("GET", _CONTROL + "requests"))
        return found

    def keys(self, prefix: str = "") -> list[str]:
        """The names of all objects, in order."""
        import xml.etree.ElementTree as ET

        text = self._call("GET", f"/{self.bucket}?prefix={urllib.parse.quote(prefix)}")
        return sorted(str(e.text) for e in ET.fromstring(text).iter() if e.tag.endswith("}Key"))

    def get(self, key: str) -> bytes:
        """The content of an object."""
        return self._call("GET", f"/{self.bucket}/{key}")

    def put(self, key: str, data: bytes) -> None:
        """Make or replace an object."""
        self._call("PUT", f"/{self.bucket}/{key}", data)

    def unfinished_uploads(self) -> list[str]:
        """The names of objects whose upload has begun and not ended."""
        import xml.etree.ElementTree as ET

        text = self._call("GET", f"/{self.bucket}?uploads")
        return sorted(str(e.text) for e in ET.fromstring(text).iter() if e.tag.endswith("Key"))

    def _start(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.strip().isdecimal(), f"the server didn't start: {line!r}"
        self._port = int(line)

    def _stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        url = f"http://127.0.0.1:{self._port}{path}"
        headers = {
            "Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request",
            "Content-Type": "application/octet-stream",
        }
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            content: bytes = answer.read()
        return content


def fail_at(endpoint: str, **rule: Any) -> None:
    """`S3Server.fail` from another process, which knows the endpoint only."""
    whole = {"times": 10**9, "status": 503, "method": "", "query": "", "key": "", **rule}
    request = urllib.request.Request(endpoint + _CONTROL + "fail", json.dumps(whole).encode(), method="POST")
    urllib.request.urlopen(request, timeout=30).close()


# ------------------------------------------------------------------ the process


class _Application:
    """moto's application, with a log and with rules that make requests fail."""

    def __init__(self, inner: Callable[..., Iterable[bytes]]) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._rules: list[dict[str, Any]] = []
        self._log: list[dict[str, Any]] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"].startswith(_CONTROL):
            return self._control(environ, start_response)
        note = {
            "method": environ["REQUEST_METHOD"],
            "key": environ["PATH_INFO"].lstrip("/").partition("/")[2],
            "query": environ.get("QUERY_STRING", ""),
            "range": environ.get("HTTP_RANGE", ""),
        }
        status = self._failure(note)
        if status not in (None, CUT):
            note.update(status=status, sent=0)
            with self._lock:
                self._log.append(note)
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            if status == 0:
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionAbortedError("as the test wants it")
            code = b"AccessDenied" if status == 403 else b"InternalError"
            body = b"<Error><Code>" + code + b"</Code><Message>as the test wants it</Message></Error>"
            start_response(f"{status} X", [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
            return [body]
        told: list[str] = []

        def started(status: str, headers: Any, *rest: Any) -> Any:
            told.append(status)
            return start_response(status, headers, *rest)

        content = list(self._inner(environ, started))
        note.update(status=int(told[0].split()[0]), sent=sum(map(len, content)))
        if status == CUT:
            note.update(status=CUT)
        with self._lock:
            self._log.append(note)
        return content if status != CUT else self._half(b"".join(content), environ)

    def _half(self, content: bytes, environ: dict[str, Any]) -> Iterable[bytes]:
        yield content[: len(content) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)

    def _failure(self, note: dict[str, Any]) -> int | None:
        with self._lock:
            for rule in self._rules:
                fits = all(rule.get(part, "") in note[part] for part in ("method", "query", "key"))
                if rule["times"] > 0 and fits:
                    rule["times"] -= 1
                    return int(rule["status"])
        return None

    def _control(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        data = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = b""
        with self._lock:
            if environ["PATH_INFO"].endswith("fail"):
                self._rules.append(json.loads(data))
            elif environ["PATH_INFO"].endswith("behave"):
                self._rules.clear()
                self._log.clear()
            else:
                body = json.dumps(self._log).encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]


def _serve() -> None:
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    application = _Application(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
