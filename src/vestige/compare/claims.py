"""Who makes which run? Claims: lock files by which processes and machines share the runs of one folder.

A claim is a file that only one process can create: ID, then ID.2, ID.3... for processes that take over a dead claim.
The last of them counts, and a release removes it and those before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from vestige.records import Run

HEARTBEAT = 15.0
"""Seconds between two updates of a held claim's modification time."""
STALE = 120.0
"""Seconds without a heartbeat after which another process may take a claimed run over."""
ATTEMPTS = 3
"""A run is recorded as failed after this many processes died while making it alone."""
SMALLER = 4
"""A stack whose process died is made again in this many parts."""


class Claims:
    """The claims of one folder, and those of them that this process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: dict[str, tuple[int, dict[str, Any]]] = {}

    def claim(self, run: Run, beside: int = 0) -> int | None:
        """Claim a run, to be stacked with `beside` others; returns how many processes died making it alone.

        None if a living process holds it, or if its process died in a stack and this one would be as large.
        """
        before = self._last_claim(run)
        if before is not None and (not before.abandoned or (before.largest is not None and beside >= before.largest)):
            return None
        number = before.number + 1 if before is not None else 1
        content: dict[str, Any] = {"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid()}
        if before is not None:
            content |= {"deaths": before.deaths, "largest": before.largest}
        path = self._file(run, number)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        if before is not None and before != _read_claim(before.path, before.number):
            path.unlink(missing_ok=True)  # the claim before was released or is alive: not ours to take over
            return None
        self._held[run.id] = number, content
        return int(content.get("deaths", 0))

    def claimed(self) -> set[str]:
        """The ids of the runs claimed by any process, living or dead."""
        return {name.partition(".")[0] for name in os.listdir(self.path)}

    def largest_stack(self, run: Run) -> int | None:
        """The largest stack in which to make a held run, after a process died with it in one; None: any."""
        largest: int | None = self._held[run.id][1].get("largest")
        return largest

    def begin(self, runs: Sequence[Run]) -> None:
        """Write into the claims how many runs this process now makes together, for a process that takes them over."""
        for run in runs:
            number, content = self._held[run.id]
            self._file(run, number).write_text(json.dumps({**content, "together": len(runs)}))

    def release(self, run: Run) -> None:
        number, _ = self._held.pop(run.id, (0, {}))
        for each in range(1, number + 1):
            self._file(run, each).unlink(missing_ok=True)

    @contextlib.contextmanager
    def kept_alive(self, runs: Sequence[Run]) -> Iterator[None]:
        """Send heartbeats for the claims of these runs while they are being made; the sequence may change meanwhile."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(HEARTBEAT):
                for run in tuple(runs):
                    self._touch(run)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _touch(self, run: Run) -> None:
        number, _ = self._held.get(run.id, (None, {}))
        if number is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file(run, number))

    def _file(self, run: Run, number: int) -> Path:
        return self.path / (run.id if number == 1 else f"{run.id}.{number}")

    def _last_claim(self, run: Run) -> Claim | None:
        names = (name.partition(".") for name in os.listdir(self.path) if name.startswith(run.id))
        number = max((int(last or 1) for _, _, last in names if last.isdigit() or not last), default=None)
        return None if number is None else _read_claim(self._file(run, number), number)


@dataclass(frozen=True)
class Claim:
    """A claim as read from its file: what it says about the process that made it."""

    path: Path
    number: int
    text: str
    modified: int
    """When its process sent the last heartbeat, in nanoseconds."""

    @property
    def content(self) -> dict[str, Any]:
        try:
            content = json.loads(self.text)
        except ValueError:
            return {}  # its process died between creating and writing it
        return content if isinstance(content, dict) else {}

    @property
    def abandoned(self) -> bool:
        """Whether the claiming process is known to be dead, or has sent no heartbeat for long."""
        content = self.content
        if content.get("host") == socket.gethostname() and isinstance(content.get("pid"), int):
            if self._restarted:  # or another machine of the same name, which would have sent heartbeats
                return time.time() - self.modified / 1e9 > 3 * HEARTBEAT
            try:
                os.kill(content["pid"], 0)
            except ProcessLookupError:
                return True
            except PermissionError:
                pass
        return time.time() - self.modified / 1e9 > STALE

    @property
    def deaths(self) -> int:
        """How many processes died while they made this run alone, the claim's own included.

        A death in a stack may be another run's fault, and a restart of the machine is no run's.
        """
        return (self._number("deaths") or 0) + (self._number("together") == 1 and not self._restarted)

    @property
    def largest(self) -> int | None:
        """The largest stack in which to make this run after this process died."""
        together = self._number("together")
        if together is None or self._restarted:
            return self._number("largest")
        return -(-together // SMALLER)

    def _number(self, key: str) -> int | None:
        value = self.content.get(key)
        return value if isinstance(value, int) and value >= 0 else None

    @property
    def _restarted(self) -> bool:
        content = self.content
        return content.get("host") == socket.gethostname() and content.get("boot") not in (None, _boot())


def _read_claim(path: Path, number: int) -> Claim | None:
    try:
        return Claim(path, number, path.read_text(), path.stat().st_mtime_ns)
    except FileNotFoundError:
        return None


@lru_cache(maxsize=1)
def _boot() -> str | None:
    """The boot id of the machine, where the system has one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
