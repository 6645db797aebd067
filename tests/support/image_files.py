"""Small images for tests, in every form that the local backend takes, and a registry on loopback that serves them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
Entry = tuple[str, "bytes | str | Mapping[str, Any]"]
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def make_tar(entries: Sequence[Entry]) -> bytes:
    """A tar of (name, content): bytes are a file, a string a symbolic link, a mapping attributes of the member."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, what in entries:
            info = tarfile.TarInfo(name)
            info.mode, data = 0o755, b""
            if isinstance(what, bytes):
                info.size, data = len(what), what
            elif isinstance(what, str):
                info.type, info.linkname = tarfile.SYMTYPE, what
            else:
                data = what.get("data", b"")
                info.size = len(data)
                for key, value in what.items():
                    if key != "data":
                        setattr(info, key, value)
            archive.addfile(info, io.BytesIO(data) if len(data) == info.size else None)  # a size may be a lie
    return buffer.getvalue()


def directory(mode: int = 0o755, **other: Any) -> dict[str, Any]:
    return {"type": tarfile.DIRTYPE, "mode": mode, **other}


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class MadeImage:
    """Blobs by digest, and the digest of the manifest (or index) that names them."""

    blobs: dict[str, bytes]
    manifest: str
    layers: list[str]
    config: str


def make_image(
    layers: Sequence[bytes], env: Sequence[str] = (), *, index: bool = True, compress: Any = gzip.compress
) -> MadeImage:
    """An image of uncompressed layers; with `index`, one that offers a foreign architecture first."""
    blobs: dict[str, bytes] = {}

    def add(data: bytes) -> dict[str, Any]:
        blobs[digest(data)] = data
        return {"digest": digest(data), "size": len(data)}

    config = add(json.dumps({"architecture": ARCHITECTURE, "os": "linux", "config": {"Env": list(env)}}).encode())
    packed = [add(compress(layer)) for layer in layers]
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": packed}
    top = add(json.dumps(manifest).encode())
    if index:
        foreign = add(b'{"schemaVersion": 2, "mediaType": "%s"}' % MANIFEST.encode())
        entries = [
            {**foreign, "platform": {"os": "linux", "architecture": "s390x"}},
            {**top, "platform": {"os": "linux", "architecture": ARCHITECTURE}},
        ]
        top = add(json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).encode())
    return MadeImage(blobs, top["digest"], [entry["digest"] for entry in packed], config["digest"])


def write_layout(image: MadeImage, path: Path) -> Path:
    """The image as an OCI layout directory."""
    (path / "blobs/sha256").mkdir(parents=True)
    for name, data in image.blobs.items():
        (path / "blobs" / name.replace(":", "/")).write_bytes(data)
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (path / "index.json").write_text(json.dumps({"manifests": [{"digest": image.manifest}]}))
    return path


def docker_archive(layers: Sequence[bytes], env: Sequence[str] = ()) -> bytes:
    """What `docker save` writes: a layer that is there twice is a link to the first one."""
    names, entries = [], list[Entry]()
    seen: dict[bytes, str] = {}
    for number, layer in enumerate(layers):
        names.append(f"{number}/layer.tar")
        entries.append((names[-1], f"../{seen[layer]}" if layer in seen else layer))
        seen.setdefault(layer, names[-1])
    manifest = [{"Config": "config.json", "RepoTags": ["a:b"], "Layers": names}]
    entries.append(("config.json", json.dumps({"config": {"Env": list(env)}}).encode()))
    return make_tar([*entries, ("manifest.json", json.dumps(manifest).encode())])


@dataclass
class FakeRegistry:
    """A registry that wants a token, redirects blobs to another host, and does what `faults` say, once each.

    `faults`: path suffix → HTTP status, or `cut` (half of the body), or `lie` (another body).
    """

    images: dict[str, MadeImage]
    password: str = ""
    faults: dict[str, int | str] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(path, Authorization) of each request."""
    host: str = ""

    def reference(self, name: str) -> str:
        return f"docker://{self.host}/{name}"


@contextmanager
def registry(fake: FakeRegistry) -> Iterator[FakeRegistry]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            _answer(self, fake)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.host = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


def _answer(handler: BaseHTTPRequestHandler, fake: FakeRegistry) -> None:
    authorization = handler.headers.get("Authorization", "")
    fake.requests.append((handler.path, authorization))
    port = fake.host.rpartition(":")[2]

    def reply(status: int, body: bytes = b"", kind: str = "application/json", **headers: str) -> None:
        handler.send_response(status)
        fault = next((suffix for suffix in fake.faults if status == 200 and handler.path.endswith(suffix)), None)
        what = fake.faults.pop(fault) if fault is not None else None
        sent = body[: len(body) // 2] if what == "cut" else bytes(len(body)) if what == "lie" else body
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(sent)

    fault = next(
        (
            suffix
            for suffix, what in fake.faults.items()
            if handler.path.endswith(suffix) and what not in ("cut", "lie")
        ),
        None,
    )
    if fault is not None:
        reply(int(fake.faults.pop(fault)), b"{}", Retry_After="0")
        return
    if handler.path.startswith("/token"):
        import base64

        if fake.password and authorization != "Basic " + base64.b64encode(f"me:{fake.password}".encode()).decode():
            reply(401, b"{}")
        else:
            reply(200, b'{"token": "t0ken"}')
        return
    if handler.path.startswith("/cdn/"):
        if authorization:
            reply(400, b"credentials for another host")
            return
        wanted = handler.path.removeprefix("/cdn/")
        found = next((image.blobs[wanted] for image in fake.images.values() if wanted in image.blobs), None)
        reply(200 if found is not None else 404, found or b"", "application/octet-stream")
        return
    if authorization != "Bearer t0ken":
        challenge = f'Bearer realm="http://{fake.host}/token",service="fake",scope="repository:x:pull"'
        reply(401, b"{}", WWW_Authenticate=challenge)
        return
    name, kind, wanted = handler.path.removeprefix("/v2/").rsplit("/", 2)
    image = fake.images.get(name)
    if image is None:
        reply(404, b"{}")
    elif kind == "blobs":
        reply(307, b"", Location=f"http://localhost:{port}/cdn/{wanted}")
    else:
        data = image.blobs.get(image.manifest if wanted == "latest" else wanted)
        kind = json.loads(data)["mediaType"] if data else "application/json"
        reply(200 if data else 404, data or b"{}", kind)
