"""Images for the local backend: archives, OCI layouts and registries, flattened once into a cache of directories."""

from sandlot.sandbox.images.store import Image, ImageStore

__all__ = ["Image", "ImageStore"]
