"""`serve_hub`: a local server that answers huggingface_hub as the hub does; repositories with one revision each."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

SHA = "0123456789" * 4


class Hub(http.server.BaseHTTPRequestHandler):
    """Repositories, data sets or models, by name: their files, and what was asked for.

    Attributes:
        files: "owner/name" to name to content; commits add to it.
        asked: Method and path of each request.
        created: What `create_repo` sent, by name.
        tokens: The "Authorization" of requests that change something.
    """

    files: dict[str, dict[str, bytes]]
    asked: list[str]
    created: dict[str, dict[str, Any]]
    tokens: list[str]

    @property
    def endpoint(self) -> str:
        host, port = self.server.server_address[:2]
        return f"http://{host!s}:{port}"

    def do_GET(self) -> None:
        parts = unquote(self.path).partition("?")[0].strip("/").split("/")
        if parts == ["api", "whoami-v2"]:
            self._send_json({"name": "me", "type": "user"})
            return
        if parts[0] == "api":
            repository, verb = "/".join(parts[2:4]), "".join(parts[4:5])
            files = self.files.get(repository)
            facts = {"id": repository, "sha": SHA, "siblings": [{"rfilename": name} for name in files or ()]}
            found: Any = self._tree(repository) if verb == "tree" else facts
            self._send_json(found, 200 if files else 404)
            return
        before, _, name = "/".join(parts).partition("/resolve/")
        files = self.files.get(before.removeprefix("datasets/"))
        name = name.partition("/")[2]
        if files is None or name not in files:
            self._send(b"", 404, "RepoNotFound" if files is None else "EntryNotFound")
        else:
            self._send(files[name], 200)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.tokens.append(self.headers.get("Authorization", ""))
        parts = unquote(self.path).partition("?")[0].strip("/").split("/")
        if parts[1:] == ["repos", "create"]:
            wish = json.loads(body)
            name = f"{wish.get('organization') or 'me'}/{wish['name']}"
            self.files.setdefault(name, {})
            self.created[name] = wish
            self._send_json({"url": f"{self.endpoint}/{name}", "name": name, "id": name})
            return
        if parts[1] == "validate-yaml":
            self._send_json({"errors": [], "warnings": []})
            return
        repository, verb = "/".join(parts[2:4]), parts[4]
        if verb == "preupload":
            wishes = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            self._send_json({"files": [{**one, "shouldIgnore": False, "oid": None} for one in wishes]})
        elif verb == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[repository][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._send_json({"commitUrl": f"{self.endpoint}/{repository}/commit/{SHA}", "commitOid": SHA})
        else:  # paths-info
            paths = json.loads(body)["paths"] if body.startswith(b"{") else []
            self._send_json([one for one in self._tree(repository) if one["path"] in paths])

    def _tree(self, repository: str) -> list[dict[str, Any]]:
        files = self.files.get(repository, {})
        return [{"type": "file", "path": name, "size": len(body), "oid": SHA} for name, body in files.items()]

    def _send_json(self, found: Any, status: int = 200) -> None:
        self._send(json.dumps(found).encode(), status, "" if status == 200 else "RepoNotFound")

    def _send(self, body: bytes, status: int, error: str = "") -> None:
        self.asked.append(f"{self.command} {self.path}")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serve_hub(files: dict[str, dict[str, bytes]]) -> Iterator[tuple[str, type[Hub]]]:
    """Serve repositories until the end of the block; yields the address for HF_ENDPOINT, and what was asked."""
    handler = type("OneHub", (Hub,), {"files": files, "asked": [], "created": {}, "tokens": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()
