"""Where does a comparison live? A folder that can be killed, restarted and filled by several machines at once."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vestige.comparison import VALIDATION, VERSION, Record, Run, Specification, belongs, kinds, trials
from vestige.files import make_folder, read_json, write_json
from vestige.questions import Question
from vestige.registry import METHODS

STALE = 120.0
"""Seconds without a sign of life after which another process may take a claimed run over."""
BEAT = 15.0
ATTEMPTS = 3
"""A run whose process died this often is recorded as failed: most likely it does not fit in memory."""

NUMBER = int | float
MAYBE = int | float | None
FAILED: dict[str, Any] = {"error": str}
DONE: dict[str, Any] = {
    "epsilon": MAYBE,
    "lr": MAYBE,
    "noise_multiplier": MAYBE,
    "seconds": MAYBE,
    "memory_mb": MAYBE,
    "stacked": int,
    "noise": str,
    "charged": list,
    "pictures": dict,
}
"""What tables, prices and pages take from the record of a failed or a finished run, beside its accuracy."""


class ComparisonFolder:
    """spec.json, runs/ID.json for each finished run, and claims/ID for each run somebody is at work on."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.runs, self.claims = self.path / "runs", self.path / "claims"
        self._seen: dict[str, Record] = {}
        self.unreadable: dict[str, str] = {}
        self._members: tuple[Specification, frozenset[str]] | None = None

    def create(self, specification: Specification) -> None:
        """Start a comparison here, or continue the very same one."""
        if (self.path / "spec.json").exists():
            if self.specification().to_json() != _plain(specification.to_json()):
                raise ValueError(
                    f"out={str(self.path)!r} holds another comparison: continue it with `vestige compare --resume "
                    f"{self.path}`, or choose another folder"
                )
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(f"out={str(self.path)!r} is not an empty folder: choose another")
        make_folder(self.path)
        self.runs.mkdir(exist_ok=True)
        self.claims.mkdir(exist_ok=True)
        if not (self.path / "spec.json").exists():
            write_json(self.path / "spec.json", {"version": VERSION, "specification": specification.to_json()})

    def specification(self) -> Specification:
        path = self.path / "spec.json"
        if not path.exists():
            raise ValueError(f"{str(self.path)!r} holds no comparison: there is no spec.json in it")
        content = read_json(path)
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION:
            raise ValueError(
                f"{path} was written by another version of vestige (format {version}, this one reads {VERSION}): "
                f"use that version, or start a new folder"
            )
        try:
            return Specification.from_json(content.get("specification"))
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}; restore a copy, or start a new folder") from error

    def records(self) -> dict[str, Record]:
        """Every finished run of this comparison, by id. A torn or foreign record is left out, named in `unreadable`."""
        for path in sorted(self.runs.glob("*.json")):
            if path.stem in self._seen or path.name.startswith("."):
                continue
            try:
                record = json.loads(path.read_text())
                self._check(_described(record, path.stem))
            except (OSError, ValueError) as error:
                self.unreadable[path.name] = (
                    str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
                )
                continue
            self.unreadable.pop(path.name, None)
            self._seen[path.stem] = record
        return dict(self._seen)

    def _check(self, run: Run) -> None:
        """Refuse a run that this comparison never needs; a folder without a specification is a pool and takes all."""
        if self._members is None and (self.path / "spec.json").exists():
            specification = self.specification()
            grid = trials(specification, {name: entry.options for name, entry in METHODS.items()})
            self._members = specification, kinds(specification, grid)
        if self._members is not None and not belongs(run, *self._members):
            raise ValueError(
                f"foreign: {run.label} on {run.task}, {run.budget}, {run.stage}, {run.steps} steps, seed {run.seed} is "
                f"no run of this comparison"
            )

    def keep(self, record: Record) -> None:
        """Make a record durable. If another process finished the same run first, its record stands."""
        path = self.runs / f"{record['id']}.json"
        if path.exists() and path.name not in self.unreadable:
            return
        write_json(path, record)

    def forget_failures(self) -> int:
        """Remove the records of failed runs, so that they are tried again."""
        failed = [record["id"] for record in self.records().values() if record["status"] == "failed"]
        for name in failed:
            (self.runs / f"{name}.json").unlink(missing_ok=True)
            del self._seen[name]
        return len(failed)

    # --- claims ------------------------------------------------------------------------------------------------------

    def claim(self, run: Run) -> int | None:
        """Claim a run for this process: the number of this attempt, or None if a living process has it."""
        path = self.claims / run.id
        attempt = 1
        before = _claim_of(path)
        if before is not None:
            if not _abandoned(path, before):
                return None
            # Whoever moves the dead claim away may make the next one; for anyone else the move fails.
            grave = path.with_name(f".{run.id}.{os.getpid()}.{time.monotonic_ns()}")
            try:
                os.rename(path, grave)
            except FileNotFoundError:
                return None
            grave.unlink(missing_ok=True)
            attempt = int(before.get("attempt", 0)) + 1
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        content = {"host": socket.gethostname(), "pid": os.getpid(), "attempt": attempt}
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        return attempt

    def release(self, run: Run) -> None:
        (self.claims / run.id).unlink(missing_ok=True)

    @contextlib.contextmanager
    def alive(self, runs: Sequence[Run]) -> Iterator[None]:
        """Keep the claims of these runs fresh while they are being made."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(BEAT):
                for run in runs:
                    with contextlib.suppress(OSError):
                        os.utime(self.claims / run.id)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _described(record: Any, name: str) -> Run:
    """The run that a record is about; ValueError says why it is none that a table could be made of."""
    if not isinstance(record, dict):
        raise ValueError("not a record")
    if record.get("version") != VERSION:
        raise ValueError(f"format {record.get('version')}, this version reads {VERSION}")
    run = Run.from_json(record.get("run"))
    if record.get("id") != name or run.id != name:
        raise ValueError("its name is not the hash of the run that it describes")
    if record.get("status") not in ("done", "failed"):
        raise ValueError(f"status is {record.get('status')!r}, neither done nor failed")
    needed = (
        FAILED
        if record["status"] == "failed"
        else {**DONE, VALIDATION if run.stage == "tuning" else "accuracy": NUMBER}
    )
    for key, kind in needed.items():
        if key not in record or not isinstance(record[key], kind):
            raise ValueError(f"its part {key!r} is {record.get(key, 'missing')!r}")
    for row in record.get("charged", ()):
        _check_charge(row)
    return run


def _check_charge(row: Any) -> None:
    try:
        Question.from_json(row)
        right = row["count"] > 0
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"charged: {row!r} is no question with its count ({type(error).__name__}: {error})") from error
    if not right:
        raise ValueError(f"charged: count={row['count']} must be positive")


def _claim_of(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text() or "{}")
    except FileNotFoundError:
        return None
    except ValueError:
        content = {}
    return content if isinstance(content, dict) else {}


def _abandoned(path: Path, claim: dict[str, Any]) -> bool:
    """Whether the claiming process is known to be dead, or has given no sign of life for long."""
    if claim.get("host") == socket.gethostname() and isinstance(claim.get("pid"), int):
        try:
            os.kill(claim["pid"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    try:
        return time.time() - path.stat().st_mtime > STALE
    except FileNotFoundError:
        return False


def _plain(content: Any) -> Any:
    """As it would be read back."""
    return Specification.from_json(json.loads(json.dumps(content))).to_json()
