"""Sandboxes as containers of Docker or Podman, by the API that both speak."""

from sandlot.sandbox.docker.backend import DockerBackend

__all__ = ["DockerBackend"]
