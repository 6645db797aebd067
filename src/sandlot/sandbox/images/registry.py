"""Pulls an image from a registry into an OCI layout, without a daemon and without a tool.

Every call may be repeated, so transport faults and overload are retried; nothing is believed but what has the digest
that was asked for.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from sandlot.errors import SandboxError
from sandlot.sandbox.images.layers import blob_name, choose, is_list
from sandlot.sandbox.images.reference import Reference

_ACCEPT = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_MAX_MANIFEST = 8 << 20
_CHUNK = 1 << 20
_TRIES = 4
_SECONDS = 60.0


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Blobs live on other hosts, which must not be given our credentials, and refuse them besides."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None:
            old, new = (urllib.parse.urlsplit(url) for url in (req.full_url, newurl))
            if old.scheme == "https" and new.scheme != "https":
                raise SandboxError(f"{old.netloc} redirects to an address without encryption", retryable=False)
            if old.netloc != new.netloc:
                request.remove_header("Authorization")
        return request


@dataclass
class Puller:
    """One image of one registry. `credentials` are (user, password); `pause` is the first wait between tries."""

    reference: Reference
    architecture: str
    credentials: tuple[str, str] | None = None
    max_bytes: int = 64 << 30
    pause: float = 0.5
    _authorization: str = field(default="", init=False)

    def digest(self) -> str:
        """The digest that the reference stands for now."""
        return self.reference.digest or self._manifest(self.reference.wanted)[0]

    def pull(self, layout: Path, digest: str) -> None:
        """Write the image `digest`, for Linux on this architecture, as an OCI layout."""
        (layout / "blobs/sha256").mkdir(parents=True)
        found, data, media_type = self._manifest(digest)
        for _ in range(4):
            manifest = _parsed(data)
            if not is_list(manifest, media_type):
                break
            found, data, media_type = self._manifest(str(choose(manifest, self.architecture)["digest"]))
        (layout / blob_name(found)).write_bytes(data)
        try:
            wanted = [manifest["config"], *manifest["layers"]]
            sizes = {str(entry["digest"]): int(entry["size"]) for entry in wanted}
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxError(
                f"the manifest of {self.reference} is not understood: {error!r}", retryable=False
            ) from error
        if sum(sizes.values()) > self.max_bytes:
            raise SandboxError(f"{self.reference} is larger than {self.max_bytes:,} bytes", retryable=False)
        for blob, size in sizes.items():
            self._blob(blob, size, layout / blob_name(blob))
        (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [{"digest": found}]}))
        (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def _manifest(self, wanted: str) -> tuple[str, bytes, str]:
        """(digest, content, media type) of a manifest."""

        def read(response: http.client.HTTPResponse) -> tuple[bytes, str]:
            return response.read(_MAX_MANIFEST + 1), response.headers.get_content_type()

        data, media_type = self._get(f"manifests/{wanted}", read, {"Accept": _ACCEPT})
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if len(data) > _MAX_MANIFEST or (wanted.startswith("sha256:") and digest != wanted):
            raise SandboxError(f"the registry's manifest of {self.reference} has the digest {digest}, not {wanted}")
        return digest, data, str(_parsed(data).get("mediaType", media_type))

    def _blob(self, digest: str, size: int, target: Path) -> None:
        def read(response: http.client.HTTPResponse) -> None:
            hashed, written = hashlib.sha256(), 0
            with target.open("wb") as file:
                while chunk := response.read(_CHUNK):
                    written += len(chunk)
                    if written > size:
                        break
                    hashed.update(chunk)
                    file.write(chunk)
            if written != size or f"sha256:{hashed.hexdigest()}" != digest:
                raise http.client.IncompleteRead(b"", size)

        self._get(f"blobs/{digest}", read, {})

    def _get(self, path: str, read: Any, headers: Mapping[str, str]) -> Any:
        """GET with authorization and retries; `read` takes what it wants of the response."""
        url = f"{self.reference.base}/v2/{self.reference.name}/{path}"
        asked_for_token = False
        failures = 0
        while True:
            authorized = {**headers, **({"Authorization": self._authorization} if self._authorization else {})}
            try:
                with _open(url, authorized) as response:
                    return read(response)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 401 and not asked_for_token:
                    asked_for_token = True
                    self._authorize(error.headers.get("WWW-Authenticate", ""))
                    continue
                if error.code in (401, 403, 404):
                    raise SandboxError(_refused(self.reference, error.code), retryable=False) from error
                problem, transient = f"HTTP {error.code}", error.code == 429 or error.code >= 500
                wait = _seconds(error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as error:
                problem, transient, wait = f"{getattr(error, 'reason', error) or error!r}", True, 0.0
            failures += 1
            if not transient or failures == _TRIES:
                raise SandboxError(f"{self.reference} could not be pulled ({path[:80]}): {problem}")
            time.sleep(max(wait, self.pause * 2 ** (failures - 1)))

    def _authorize(self, challenge: str) -> None:
        """Answer a challenge: a token from the named service, or the credentials themselves."""
        scheme, _, rest = challenge.partition(" ")
        basic = "Basic " + base64.b64encode(":".join(self.credentials).encode()).decode() if self.credentials else ""
        if scheme.lower() == "basic" and basic:
            self._authorization = basic
            return
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        realm = urllib.parse.urlsplit(fields.get("realm", ""))
        if scheme.lower() != "bearer" or realm.scheme not in (
            ("https", "http") if self.reference.is_local else ("https",)
        ):
            raise SandboxError(_refused(self.reference, 401), retryable=False)
        query = {"service": fields.get("service", ""), "scope": f"repository:{self.reference.name}:pull"}
        url = urllib.parse.urlunsplit(
            realm._replace(query=urllib.parse.urlencode({k: v for k, v in query.items() if v}))
        )
        try:
            with _open(url, {"Authorization": basic} if basic else {}) as response:
                answer = _parsed(response.read(_MAX_MANIFEST))
        except urllib.error.HTTPError as error:
            error.close()
            raise SandboxError(_refused(self.reference, error.code), retryable=error.code >= 500) from error
        except (OSError, http.client.HTTPException) as error:
            raise SandboxError(f"the token service of {self.reference.host} does not answer: {error}") from error
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str) or not token.isprintable():
            raise SandboxError(f"the token service of {self.reference.host} gave no token")
        self._authorization = f"Bearer {token}"


def _open(url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "sandlot", **headers})
    opener = urllib.request.build_opener(_Redirects)
    return cast("http.client.HTTPResponse", opener.open(request, timeout=_SECONDS))


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise SandboxError("the registry answered with something else than a JSON object")
    return value


def _seconds(text: str | None) -> float:
    return min(60.0, float(text)) if text and text.isdigit() else 0.0


def _refused(reference: Reference, code: int) -> str:
    if code == 404:
        return f"the registry has no image {reference}; check the name and tag"
    return f"the registry refuses {reference} (HTTP {code}); check the name, or `docker login {reference.host}`"


def stored_credentials(host: str) -> tuple[str, str] | None:
    """What `docker login`, `podman login` or `skopeo login` stored as plain text for a registry."""
    home = Path.home()
    places = [os.environ.get("REGISTRY_AUTH_FILE"), os.environ.get("DOCKER_CONFIG")]
    files = [
        Path(places[0]) if places[0] else Path(f"/run/user/{os.getuid()}/containers/auth.json"),
        (Path(places[1]) if places[1] else home / ".docker") / "config.json",
    ]
    names = [host] if host != "registry-1.docker.io" else ["https://index.docker.io/v1/", "docker.io", host]
    for file in files:
        with suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
            auths = json.loads(file.read_text())["auths"]
            for name in names:
                if auth := auths.get(name, {}).get("auth"):
                    user, _, password = base64.b64decode(auth).decode().partition(":")
                    return user, password
    return None
