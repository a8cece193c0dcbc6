"""What does a run leave on disk? A folder that can be resumed, verified and reported from."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from vestige.accounting.ledger import LedgerError
from vestige.files import make_folder, read_json, read_tensors, remove_unfinished, sha256, write_json, write_tensors
from vestige.processes.group import ALONE, Processes
from vestige.training.loop import Record

Records = Generator[Record, None, None]

CHECKPOINT_SHARE = 0.01
"""Checkpoints are written as often as possible while they take less than this share of the training time."""
CHECKPOINT_AFTER = 0.5
"""Seconds before the first of them; that of step 0 is written before any question is asked."""


class RunFolder:
    """run.json (the request), ledger.jsonl, checkpoint.pt, records.jsonl and, at the end, result.json and model.pt."""

    def __init__(self, path: str | Path, group: Processes = ALONE) -> None:
        """Of a group, process 0 writes and reads for all."""
        self.path, self._group = Path(path), group

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def records(self) -> Path:
        return self.path / "records.jsonl"

    def create(self, request: dict[str, object]) -> None:
        """Claim a new or empty folder for this run; a folder that holds anything else is refused."""
        self._group.first(lambda: self._create(request))

    def _create(self, request: dict[str, object]) -> None:
        if self.path.is_dir():
            remove_unfinished(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"out={str(self.path)!r} is a file: choose a folder")
        if self.path.exists() and any(self.path.iterdir()):
            already = "holds a run" if (self.path / "run.json").exists() else "is not an empty folder"
            way = ", or continue it: resume=True (in the shell, --resume FOLDER)" if already == "holds a run" else ""
            raise ValueError(f"out={str(self.path)!r} already {already}: choose another{way}")
        make_folder(self.path)
        write_json(self.path / "run.json", request)

    def request(self) -> dict[str, Any]:
        if not (self.path / "run.json").exists():
            raise ValueError(f"resume={str(self.path)!r} holds no run: there is no run.json in it")
        request = read_json(self.path / "run.json")
        if not isinstance(request, dict):
            raise ValueError(f"{self.path / 'run.json'} holds a {type(request).__name__}, not a run's request")
        return request

    def save_checkpoint(self, content: dict[str, object]) -> None:
        if self._group.rank == 0:
            write_tensors(self.checkpoint, content)

    def remove_all_but(self, kept: str, prefix: str) -> None:
        """Remove what earlier checkpoints have left in folders of this prefix."""
        for path in self.path.glob(f"{prefix}*"):
            if path.name != kept:
                shutil.rmtree(path, ignore_errors=True)

    def load_checkpoint(self) -> dict[str, Any]:
        content: dict[str, object] = self._group.first(lambda: read_tensors(self.checkpoint))
        return content

    def finish(self, result: dict[str, object], weights: dict[str, object]) -> None:
        write_tensors(self.path / "model.pt", weights)
        write_json(self.path / "result.json", result)

    def hashes(self) -> dict[str, str]:
        """The SHA-256 of every file but the ledger, and Markdown: a card is written after the end, and edited."""
        files = sorted(path for path in self.path.rglob("*") if path.is_file() and path != self.ledger)
        return {path.relative_to(self.path).as_posix(): sha256(path) for path in files if path.suffix != ".md"}

    def last_record(self) -> int:
        """The last step that has a record; -1 where none has."""
        lines = self.records.read_bytes().splitlines() if self.records.exists() else []
        for line in reversed(lines):
            # A torn last line, or what a forger wrote.
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
                return int(json.loads(line)["step"])
        return -1

    def require_asked(self, last: int) -> None:
        """Refuse records of steps after the last one that the ledger asks about; -1 where there is no ledger."""
        recorded = self.last_record()
        if recorded > last:
            asked = f"asks up to step {last}" if last >= 0 else "asks about no step"
            raise LedgerError(
                f"{self.ledger} {asked}, and {self.records.name} has step {recorded}: rows were cut from the ledger, "
                "or it is another run's; restore it, or start another run, in a new folder: what was asked adds to it"
            )

    def result(self) -> dict[str, object] | None:
        path = self.path / "result.json"
        return read_json(path) if path.exists() else None

    def log(
        self, records: Generator[Record, None, None], from_step: int, extra: dict[str, object]
    ) -> Generator[Record, None, None]:
        """Pass records through, appending each to records.jsonl; those of steps that will be redone are dropped first.

        `extra` is read at every record: a consumer may put released quantities there (accuracy on public data).
        """
        if self._group.rank != 0:
            yield from records
            return
        self._drop_records_from(from_step)
        with open(self.records, "a", buffering=1) as file, contextlib.closing(records):
            for record in records:
                try:
                    yield record
                finally:
                    file.write(json.dumps({**record.to_json(), **extra}) + "\n")
                    extra.clear()

    def _drop_records_from(self, step: int) -> None:
        if not self.records.exists():
            return
        kept = []
        for line in self.records.read_text().splitlines(keepends=True):
            with contextlib.suppress(ValueError):  # a torn last line belongs to a step that will be redone
                if json.loads(line)["step"] < step:
                    kept.append(line)
        self.records.write_text("".join(kept))


def paced(
    records: Iterator[Record], save: Callable[[], None], decided: Callable[[bool], bool] = bool
) -> Generator[Record, None, None]:
    """Pass records through, saving a checkpoint whenever all saving stays a small share of the time since the start.

    The last save is at the end, or where the consumer stops: breaking out of a loop loses nothing. An error inside a
    step saves nothing, since its state may be half updated. `decided` makes one decision of those of several processes,
    where all of them save.
    """
    begin = time.perf_counter()
    cost = spent = 0.0
    whole = True
    try:
        while True:
            whole = False
            record = next(records, None)
            whole = True
            if record is None:
                return
            yield record
            now = time.perf_counter()
            if decided(now - begin > CHECKPOINT_AFTER and spent + cost < CHECKPOINT_SHARE * (now - begin)):
                save()
                cost = time.perf_counter() - now
                spent += cost
    finally:
        if whole:
            save()
