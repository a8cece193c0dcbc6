"""Where does a comparison live? A folder that can be killed, restarted and filled by several machines at once."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from vestige.compare.comparison import (
    VALIDATION,
    VALIDATION_CURVE,
    VERSION,
    Record,
    Run,
    Specification,
    belongs,
    kinds,
    trials,
)
from vestige.files import make_folder, read_json, write_json
from vestige.methods.registry import METHODS
from vestige.questions import Question

STALE = 120.0
"""Seconds without a sign of life after which another process may take a claimed run over."""
BEAT = 15.0
ATTEMPTS = 3
"""A run whose process died so often while it made nothing else is recorded as failed."""
SMALLER = 4
"""A stack whose process died is made again in parts, each at most this fraction of it."""

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
    "sampling": str,
    "expected_batch": NUMBER,
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
        self._held: dict[str, tuple[int, dict[str, Any]]] = {}
        self._members: tuple[Specification, frozenset[str]] | None = None

    def create(self, specification: Specification) -> None:
        """Start a comparison here, or continue the very same one."""
        if (self.path / "spec.json").exists():
            if _whats_compared(self.specification()) != _whats_compared(specification):
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
        self._learn_members()
        for path in sorted(self.runs.glob("*.json")):
            if path.stem in self._seen or path.name.startswith("."):
                continue
            try:
                record = json.loads(path.read_text())
                run = _described(record, path.stem)
                if not self._own(run):
                    raise ValueError(f"foreign: {_told(run)} is no run of this comparison")
            except (OSError, ValueError) as error:
                self.unreadable[path.name] = (
                    str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
                )
                continue
            self.unreadable.pop(path.name, None)
            self._seen[path.stem] = record
        return dict(self._seen)

    def _own(self, run: Run) -> bool:
        """Whether this comparison can come to need a run; a folder without a specification is a pool and takes all."""
        return self._members is None or belongs(run, *self._members)

    def _learn_members(self) -> None:
        if self._members is None and (self.path / "spec.json").exists():
            specification = self.specification()
            grid = trials(specification, {name: entry.options for name, entry in METHODS.items()})
            self._members = specification, kinds(specification, grid)

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
    #
    # A claim is a file that one process can make: ID, and ID.2, ID.3... for whoever takes over from the dead claim
    # before it. The last of them counts, and a release takes its own and those before it away.

    def claim(self, run: Run, beside: int = 0) -> int | None:
        """Claim a run for this process, to be made `beside` so many others: how many processes died making it alone.

        None if a living process has it, or if its process died in a stack and this one would be as large.
        """
        before = self._last_claim(run)
        if before is not None and (not before.abandoned or (before.largest is not None and beside >= before.largest)):
            return None
        number = before.number + 1 if before is not None else 1
        content: dict[str, Any] = {"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid()}
        if before is not None:
            content |= {"deaths": before.deaths, "largest": before.largest}
        path = self._claim_path(run, number)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        if before is not None and before != _read_claim(before.path, before.number):
            path.unlink(missing_ok=True)  # it was released, or gave a sign of life: it is not the one we may follow
            return None
        self._held[run.id] = number, content
        return int(content.get("deaths", 0))

    def claimed(self) -> set[str]:
        """The ids of the runs that somebody claimed, living or dead."""
        return {name.partition(".")[0] for name in os.listdir(self.claims)}

    def largest_stack(self, run: Run) -> int | None:
        """In how large a stack a claimed run may be made, where one that it was in died; None: in any."""
        largest: int | None = self._held[run.id][1].get("largest")
        return largest

    def begin(self, runs: Sequence[Run]) -> None:
        """Write into the claims how many runs this process makes together from now on, for whoever finds them dead."""
        for run in runs:
            number, content = self._held[run.id]
            self._claim_path(run, number).write_text(json.dumps({**content, "together": len(runs)}))

    def release(self, run: Run) -> None:
        number, _ = self._held.pop(run.id, (0, {}))
        for each in range(1, number + 1):
            self._claim_path(run, each).unlink(missing_ok=True)

    def _claim_path(self, run: Run, number: int) -> Path:
        return self.claims / (run.id if number == 1 else f"{run.id}.{number}")

    def _last_claim(self, run: Run) -> Claim | None:
        names = (name.partition(".") for name in os.listdir(self.claims) if name.startswith(run.id))
        number = max((int(last or 1) for _, _, last in names if last.isdigit() or not last), default=None)
        return None if number is None else _read_claim(self._claim_path(run, number), number)

    def _sign(self, run: Run) -> None:
        """A sign of life."""
        number, _ = self._held.get(run.id, (None, {}))
        if number is not None:
            with contextlib.suppress(OSError):
                os.utime(self._claim_path(run, number))

    @contextlib.contextmanager
    def alive(self, runs: Sequence[Run]) -> Iterator[None]:
        """Keep the claims of these runs fresh while they are being made; the sequence may change meanwhile."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(BEAT):
                for run in tuple(runs):
                    self._sign(run)

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
    score, curve = (VALIDATION, VALIDATION_CURVE) if run.stage == "tuning" else ("accuracy", "curve")
    needed = FAILED if record["status"] == "failed" else {**DONE, score: NUMBER, curve: list}
    for key, kind in needed.items():
        if key not in record or not isinstance(record[key], kind):
            raise ValueError(f"its part {key!r} is {record.get(key, 'missing')!r}")
    for row in record.get("charged", ()):
        _check_charge(row)
    return run


def _told(run: Run) -> str:
    return f"{run.label} on {run.task}, {run.budget}, {run.stage}, {run.steps} steps, seed {run.seed}"


def _check_charge(row: Any) -> None:
    try:
        Question.from_json(row)
        right = isinstance(row["count"], int) and row["count"] > 0
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"charged: {row!r} is no question with its count ({type(error).__name__}: {error})") from error
    if not right:
        raise ValueError(f"charged: count={row['count']} must be a whole number from 1 up")


@dataclass(frozen=True)
class Claim:
    """What a claim says of the process that made it, as it was read."""

    path: Path
    number: int
    text: str
    signed: int
    """When its process last gave a sign of life, in nanoseconds."""

    @property
    def content(self) -> dict[str, Any]:
        try:
            content = json.loads(self.text)
        except ValueError:
            return {}  # torn at birth
        return content if isinstance(content, dict) else {}

    @property
    def abandoned(self) -> bool:
        """Whether the claiming process is known to be dead, or has given no sign of life for long."""
        content = self.content
        if content.get("host") == socket.gethostname() and isinstance(content.get("pid"), int):
            if self._restarted:  # or another machine of the same name, which would have signed
                return time.time() - self.signed / 1e9 > 3 * BEAT
            try:
                os.kill(content["pid"], 0)
            except ProcessLookupError:
                return True
            except PermissionError:
                pass
        return time.time() - self.signed / 1e9 > STALE

    @property
    def deaths(self) -> int:
        """How many processes died while they made this run alone, this one with them: of nothing but it, or killed.

        A death in a stack may be another run's fault, and a machine that was started again is nobody's.
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
    """Which start of this machine this is, where that can be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _whats_compared(specification: Specification) -> Any:
    """As it would be read back, without where the data are: that may differ from machine to machine."""
    nowhere = tuple(replace(problem, data=None) for problem in specification.problems)
    content = json.loads(json.dumps(replace(specification, problems=nowhere).to_json()))
    return Specification.from_json(content).to_json()
