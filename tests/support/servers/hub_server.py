"""A server with as much of the Hugging Face Hub's API as downloading a model needs."""

import hashlib
import json
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = "5f" * 20


class HubServer(ThreadingHTTPServer):
    """Serves folders as repositories; counts the files that were downloaded."""

    def __init__(self, repositories: Mapping[str, Path], gated: str) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repositories = repositories
        self.gated = gated
        self.downloads: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class HubHandler(BaseHTTPRequestHandler):
    """One request."""

    server: HubServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._handle(with_body=False)

    def do_GET(self) -> None:
        self._handle(with_body=True)

    def _handle(self, *, with_body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        name, rest = "/".join(parts[:2]), parts[2:]
        if name == self.server.gated:
            self._refuse(403, "GatedRepo", with_body)
        elif name not in self.server.repositories:
            self._refuse(401, "RepoNotFound", with_body)
        elif is_api:
            self._send(json.dumps(self._describe(name, rest)).encode(), {}, with_body)
        else:
            file = self.server.repositories[name] / "/".join(rest[2:])
            content = file.read_bytes()
            if with_body:
                self.server.downloads.append(file.name)
            etag = hashlib.sha1(content).hexdigest()
            self._send(content, {"ETag": f'"{etag}"', "X-Repo-Commit": SHA}, with_body)

    def _describe(self, name: str, rest: list[str]) -> object:
        files = sorted(self.server.repositories[name].iterdir())
        if rest and rest[0] == "tree":
            return [
                {
                    "type": "file",
                    "path": file.name,
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                }
                for file in files
            ]
        return {"id": name, "sha": SHA, "siblings": [{"rfilename": file.name} for file in files]}

    def _refuse(self, status: int, code: str, with_body: bool) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": f"{code} says no\tin a header"}
        self._send(b'{"error": "no"}', headers, with_body, status)

    def _send(
        self, content: bytes, headers: Mapping[str, str], with_body: bool, status: int = 200
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)


@contextmanager
def serve_hub(repositories: Mapping[str, Path], gated: str) -> Generator[HubServer]:
    """Serve repositories while the block runs."""
    with HubServer(repositories, gated) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
