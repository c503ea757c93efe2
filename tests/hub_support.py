"""A simulated cache of the hub, and a server that speaks the hub's API on loopback."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

import pytest

from moepack.checkpoint.remote import transfer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(cache: Path, name: str, model: Path, commit: str = COMMIT, revision: str = "main") -> Path:
    """Arrange a model like the hub's cache: blobs, a snapshot of links to them, a reference. Returns the snapshot."""
    root = cache / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(commit)
    for file in model.iterdir():
        content = file.read_bytes()
        blob = root / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(Path("../..") / "blobs" / blob.name)
    return snapshot


LARGE = 20_000

STORED = (".safetensors", ".gguf")
"""Suffixes of the files that the content network has. The hub itself has the others."""


@dataclass
class Request:
    """A request that the server received: method, path, the range's first byte (None without), and authorization."""

    method: str
    path: str
    start: int | None
    authorization: str | None


@dataclass
class Answer:
    """How the server answers instead of correctly.

    Attributes:
        status: an error status, or 0 for the file.
        headers: more headers.
        keep: number of bytes of the body that are sent before the connection closes; None sends all.
        delay: seconds before each piece of the body.
        change: changes the body.
        whole: ignore the range.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    keep: int | None = None
    delay: float = 0.0
    change: Callable[[bytes], bytes] = bytes
    whole: bool = False


Fault = Callable[[Request], Answer | None]


class Hub:
    """A hub with models from directories, one commit each, and a content network at another address.

    Attributes:
        url: address of the hub.
        requests: all requests to files, in order.
        fault: decides how a request is answered wrongly; None answers all correctly.
        token: if set, files need it.
        sent: bytes of weights sent so far, those being sent included.
        names_only: list files without sizes and digests, as some mirrors do.
        tags: the tags of models that a search finds.
        xet: answer as for files in xet storage, whose own server is missing.
        pause: seconds before each response of more than `LARGE` bytes.
    """

    def __init__(self, models: dict[str, Path], token: str | None = None) -> None:
        self.models, self.token = models, token
        self.requests: list[Request] = []
        self.fault: Fault = lambda _: None
        self.sent = 0
        self._counting = threading.Lock()
        self.pause = 0.0
        self.names_only = False
        self.xet = False
        self.tags: dict[str, set[str]] = {}
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler(place)) for place in ("hub", "network")]
        # Two host names, because huggingface_hub before 2.0 follows redirects within one host to the end.
        self.url, self.network = (
            f"http://{host}:{server.server_address[1]}"
            for host, server in zip(("127.0.0.1", "localhost"), self._servers, strict=True)
        )
        for server in self._servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop both servers."""
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def shards(self) -> list[Request]:
        """Return the requests for shards at the content network."""
        return [each for each in self.requests if each.path.startswith("/network/")]

    def _handler(self, place: str) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub._answer(self, place)

            def do_GET(self) -> None:
                hub._answer(self, place)

        return Handler

    def _answer(self, handler: BaseHTTPRequestHandler, place: str) -> None:
        path = unquote(urlparse(handler.path).path)
        try:
            if place == "network":
                file = self._at(path.removeprefix("/network/"))
                tag = _digest(file, file.stat().st_mtime_ns)[:32]
                self._file(handler, path, file, {"ETag": f'"{tag}-5"'})
            elif path.startswith("/api/models"):
                self._api(handler, path)
            else:
                self._resolve(handler, path)
        except (BrokenPipeError, ConnectionResetError):
            handler.close_connection = True

    def _at(self, path: str) -> Path:
        owner, name, file = path.split("/", 2)
        return self.models[f"{owner}/{name}"] / file

    def _api(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        if "/xet-read-token/" in path:
            return _send(handler, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
        if path == "/api/models":
            tags = parse_qs(urlparse(handler.path).query).get("filter", [])
            listed = [{"id": name} for name, known in self.tags.items() if known >= {*",".join(tags).split(",")}]
            return _send(handler, 200, json.dumps(listed).encode(), {"Content-Type": "application/json"})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+))?", path)
        assert match, path
        if match[1] not in self.models:
            return _send(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"})
        if match[3] not in (None, "main", COMMIT):
            return _send(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no revision"})
        if answer := self.fault(Request(handler.command, path, None, None)):
            return _send(handler, answer.status, b"{}", answer.headers)
        root = self.models[match[1]]
        files = sorted(file for file in root.rglob("*") if file.is_file())
        listed = []
        for file in files:
            path = file.relative_to(root).as_posix()
            sha256, size = _digest(file, file.stat().st_mtime_ns), file.stat().st_size
            entry = {"size": size, "oid" if match[2] == "tree" else "blobId": sha256[:40]}
            if file.suffix in STORED:
                key = {"oid": sha256} if match[2] == "tree" else {"sha256": sha256}
                entry["lfs"] = {**key, "size": size, "pointerSize": 134}
            listed.append({"type": "file", "path": path, "rfilename": path, **entry})
        if self.names_only and match[2] != "tree":
            listed = [{"rfilename": entry["rfilename"]} for entry in listed]
        found = listed if match[2] == "tree" else {"id": match[1], "sha": COMMIT, "siblings": listed}
        return _send(
            handler, 200, json.dumps(found).encode(), {"Content-Type": "application/json", "X-Repo-Commit": COMMIT}
        )

    def _resolve(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match is None:
            return _send(handler, 404, b"", {})
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            return _send(handler, 401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        file = self._at(f"{match[1]}/{match[3]}")
        if not file.is_file():
            return _send(handler, 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        digest = _digest(file, file.stat().st_mtime_ns)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'}
        if file.suffix not in STORED:
            return self._file(handler, path, file, headers)
        self.requests.append(request := _request(handler, path))
        answer = self.fault(request) or Answer()
        location = f"{self.network}/network/{match[1]}/{match[3]}?signature=abc"
        linked = {"X-Linked-Size": str(file.stat().st_size), "X-Linked-Etag": f'"{digest}"', "Location": location}
        if self.xet:
            route = f"{self.url}/api/models/{match[1]}/xet-read-token/{COMMIT}"
            linked |= {"X-Xet-Hash": digest, "X-Xet-Refresh-Route": route, "ETag": f'"{digest[::-1]}"'}
            linked["Link"] = (
                f'<{route}>; rel="xet-auth", <{self.network}/reconstructions>; rel="xet-reconstruction-info"'
            )
        return _send(handler, answer.status or 302, b"", {**headers, **linked, **answer.headers})

    def _file(
        self, handler: BaseHTTPRequestHandler, path: str, file: Path, headers: dict[str, str] | None = None
    ) -> None:
        request = _request(handler, path)
        self.requests.append(request)
        answer = self.fault(request) or Answer()
        if answer.status:
            return _send(handler, answer.status, b"", answer.headers)
        size, status, more = file.stat().st_size, 200, dict(headers or {})
        start, stop = 0, size - 1
        wanted = handler.headers.get("Range", "")
        if (match := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)) and not answer.whole:
            start, stop = int(match[1]), min(int(match[2] or size - 1), size - 1)
            status = 206
            more["Content-Range"] = f"bytes {start}-{stop}/{size}"
        with file.open("rb") as stream:
            stream.seek(start)
            content = answer.change(stream.read(stop + 1 - start))
        if len(content) > LARGE:
            time.sleep(self.pause)
        if file.suffix in STORED and handler.command != "HEAD":
            with self._counting:  # before the client has the bytes, so that it sees them counted
                self.sent += len(content[: answer.keep])
        return _send(handler, status, content, {**more, **answer.headers}, answer.keep, answer.delay)


@cache
def _digest(file: Path, modified: int) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _request(handler: BaseHTTPRequestHandler, path: str) -> Request:
    match = re.match(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    return Request(handler.command, path, int(match[1]) if match else None, handler.headers.get("Authorization"))


def _send(
    handler: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: dict[str, str],
    keep: int | None = None,
    delay: float = 0.0,
) -> None:
    """Send a response; close the connection early if `keep` is less than the body."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command == "HEAD":
        return
    kept = body if keep is None else body[:keep]
    for start in range(0, len(kept), 1 << 16):
        time.sleep(delay)
        handler.wfile.write(kept[start : start + (1 << 16)])
    handler.wfile.flush()
    if len(kept) < len(body):
        handler.close_connection = True


@contextmanager
def serving(models: dict[str, Path], token: str | None = None) -> Iterator[Hub]:
    """Run a hub."""
    hub = Hub(models, token)
    try:
        yield hub
    finally:
        hub.close()


def use(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process use a hub and an empty cache, and wait only briefly after failures."""
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in (
        ("ENDPOINT", server.url),
        ("HUGGINGFACE_CO_URL_TEMPLATE", template),
        ("HF_HUB_CACHE", str(tmp_path / "cache")),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_DOWNLOAD_TIMEOUT", 30),
    ):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr(transfer, "PAUSE", 0.02)
    monkeypatch.setattr(transfer, "LONGEST", 0.05)


def bytes_in(folder: Path, *patterns: str) -> int:
    """Return the bytes of files that were in a folder at one time, while another thread adds and removes files."""
    while True:
        files, total = [file for pattern in patterns for file in folder.glob(pattern)], 0
        for file in files:
            with suppress(FileNotFoundError):
                total += file.stat().st_size
        if files == [file for pattern in patterns for file in folder.glob(pattern)]:
            return total


def held_from(server: Hub, reached: Callable[[], bool]) -> threading.Event:
    """Hold back all weights once a condition is true, so that a job cannot finish; return the event that ends it."""
    ended = threading.Event()

    def hold(request: Request) -> None:
        if request.path.startswith("/network/") and reached():
            ended.wait(600)

    server.fault = hold
    return ended
