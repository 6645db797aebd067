"""Harbor's environments as sandboxes, and the local sandbox as one of Harbor's environments (`environment.py`)."""

from sandlot.sandbox.harbor.backend import HarborBackend

__all__ = ["HarborBackend"]
