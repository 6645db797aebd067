from support.sandboxes import backend

__all__ = ["backend"]
