"""Which person and which process does an entry of a book name, and does that process still run?"""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path
from typing import Any


def person() -> str:
    """The name that entries are written under: VESTIGE_PERSON, or the login. It is a label, not a proof of identity:
    a person who may write the file may write any name."""
    named = os.environ.get("VESTIGE_PERSON", "").strip()
    if named:
        return named
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def this_process() -> dict[str, object]:
    return {"host": _host(), "pid": os.getpid(), "started": _started(os.getpid())}


def has_ended(holder: dict[str, Any] | None) -> bool:
    """Whether a reservation's process is known to have ended; of another machine's nothing is known."""
    if not holder or holder.get("host") != _host():
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    now = _started(holder["pid"])
    return now is not None and holder.get("started") is not None and now != holder["started"]


def _host() -> str:
    """The machine; in a container, whose processes have numbers of their own, that."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str | None:
    """When a process began, since a number may be given to another one; None where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return None
