"""A mirror of the Hugging Face Hub on loopback: the endpoints that a download uses, with local folders.

`Mirror.break_at` ends each connection after that many bytes of a file. `Mirror.ranges` has the first byte of each
requested file.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Mirror:
    """Repositories by `models/owner/name` or `datasets/owner/name`, each a folder with one commit."""

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.extra_names: list[str] = []
        self.break_at: int | None = None
        self.ranges: list[tuple[str, int]] = []
        self.url = ""

    def files(self, repository: str) -> dict[str, bytes]:
        folder = self.repositories[repository]
        found = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
        return {name: file.read_bytes() for name, file in found.items()} | dict.fromkeys(self.extra_names, b"x")

    @contextmanager
    def serving(self) -> Iterator["Mirror"]:
        handler = type("Handler", (_Handler,), {"mirror": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    mirror: Mirror
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[0] == "api" and len(parts) < 4:  # requests of huggingface_hub itself
            return self._refuse(404, "EntryNotFound")
        if parts[0] == "api":
            _, kind, owner, name, *rest = parts
        else:
            kind = parts.pop(0) if parts[0] == "datasets" else "models"
            owner, name, *rest = parts
        repository = f"{kind}/{owner}/{name}"
        if repository not in self.mirror.repositories:
            return self._refuse(401 if "authorization" not in self.headers else 404, "RepoNotFound")
        if repository in self.mirror.gated:
            return self._refuse(403, "GatedRepo")
        word, revision, *path = rest or ["revision", "main"]
        if revision not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        files = self.mirror.files(repository)
        if word == "resolve":
            return self._file("/".join(path), files["/".join(path)])
        oid = {file: hashlib.sha1(data).hexdigest() for file, data in files.items()}
        if word == "tree":
            return self._json([{"type": "file", "path": f, "size": len(d), "oid": oid[f]} for f, d in files.items()])
        siblings = [{"rfilename": f, "size": len(d), "blobId": oid[f]} for f, d in files.items()]
        return self._json({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, data: bytes) -> None:
        digest = hashlib.sha1(data).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.mirror.ranges.append((name, start))
        self._send(206 if start else 200, data[start:], headers, self.mirror.break_at)

    def _send(self, status: int, body: bytes, headers: dict[str, str], break_at: int | None = None) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with suppress(ConnectionError):
            self.wfile.write(body[:break_at])
        if break_at is not None and len(body) > break_at:
            self.close_connection = True
