"""Names of images in registries."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sandlot.errors import SandboxUnavailableError

SCHEME = "docker://"
_HUB = "registry-1.docker.io"
_NAME = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]+)?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """`host/name:tag` or `host/name@digest`. `host` is where the registry answers."""

    host: str
    name: str
    tag: str
    digest: str = ""

    @property
    def wanted(self) -> str:
        """What to ask the registry for."""
        return self.digest or self.tag

    @property
    def base(self) -> str:
        """The registry's address; on this machine it may speak plain HTTP, as with Docker."""
        return f"{'http' if self.is_local else 'https'}://{self.host}"

    @property
    def is_local(self) -> bool:
        """Whether the registry is on this machine."""
        host = self.host.rpartition(":")[0] if re.search(r":\d+$", self.host) else self.host
        return host in ("localhost", "[::1]") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None

    def __str__(self) -> str:
        return f"{self.host}/{self.name}" + (f"@{self.digest}" if self.digest else f":{self.tag}")


def parse(text: str) -> Reference:
    """A reference as Docker reads it: no host means Docker Hub, no tag means `latest`; `docker://` may be in front."""
    rest = text.removeprefix(SCHEME)
    rest, _, digest = rest.partition("@")
    first, slash, path = rest.partition("/")
    if slash and (any(c in first for c in ".:") or first == "localhost"):
        host = first
    else:
        host, path = "docker.io", rest
    path, colon, tag = path.partition(":")
    if host in ("docker.io", "index.docker.io"):
        host = _HUB
        path = path if "/" in path else f"library/{path}"
    fine = _HOST.fullmatch(host) and _NAME.fullmatch(path) and len(path) < 256
    if not fine or (colon and not _TAG.fullmatch(tag)) or ("@" in text and not _DIGEST.fullmatch(digest)):
        raise SandboxUnavailableError(f"{text!r} is no image reference; write docker://HOST/NAME:TAG or …@sha256:…")
    return Reference(host, path, tag or "latest", digest)
