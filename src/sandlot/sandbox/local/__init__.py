"""The embedded sandbox: Linux namespaces without a daemon, as root and as a plain user.

bubblewrap was the first choice and is not used, since it cannot carry the contract. It must exec a program of the
image as the sandbox's PID 1; where only one id is mapped, that program runs as the agent's own user, and code inside
opens `/proc/1/mem` for writing and `/proc/1/fd` (tried with bubblewrap 0.11, all capabilities dropped). An image
would also have to bring that program, and layers keep the machine's owners, so that the sandbox's root could not
change them. PID 1 is therefore a forked process of ours that never execs: see `sandlot.sandbox.jail`.
"""

from sandlot.sandbox.local.backend import LocalBackend

__all__ = ["LocalBackend"]
