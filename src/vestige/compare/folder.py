"""Where is a comparison kept? In a folder that survives kills and restarts, and that one process fills."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vestige.compare.run_grid import membership
from vestige.compare.specification import Specification
from vestige.files import lock, make_folder, read_json, write_json
from vestige.run_records import FORMAT_VERSION, FailedRun, Run, RunRecord, failed, read_record


class ComparisonFolder:
    """spec.json, runs/ID.json for each run on record, and a file that the process locks which makes runs.

    Without a spec.json it is a pool of runs, and every record belongs to it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.runs = self.path / "runs"
        self.unreadable: dict[str, str] = {}
        """Files that are not records of this comparison, and why."""
        self._read: dict[str, RunRecord] = {}
        self._belongs: Callable[[Run], bool] | None = None

    def create(self, specification: Specification) -> None:
        """Start a comparison here, or continue the same one."""
        if (self.path / "spec.json").exists():
            if _compared(self.specification()) != _compared(specification):
                raise ValueError(
                    f"out={str(self.path)!r} holds another comparison: continue it with `vestige compare --resume "
                    f"{self.path}`, or choose another folder"
                )
        elif self.path.exists() and not self.path.is_dir():
            raise ValueError(f"out={str(self.path)!r} is a file: choose a folder")
        elif self.path.exists() and any(self.path.iterdir()):
            raise ValueError(f"out={str(self.path)!r} is not an empty folder: choose another")
        self.create_pool()
        if not (self.path / "spec.json").exists():
            write_json(self.path / "spec.json", {"version": FORMAT_VERSION, "specification": specification.to_json()})

    def create_pool(self) -> None:
        """Make the folder for records."""
        make_folder(self.path)
        self.runs.mkdir(exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process makes runs of this folder; ValueError if one does already."""
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                lock(handle, self.path)
            except ValueError:
                raise ValueError(
                    f"{str(self.path)!r} is being filled by another process: wait for it, or stop it and continue "
                    "it with more --workers, or with --engine ray on several machines"
                ) from None
            yield
        finally:
            os.close(handle)

    def specification(self) -> Specification:
        path = self.path / "spec.json"
        if not path.exists():
            raise ValueError(f"{str(self.path)!r} holds no comparison: there is no spec.json in it")
        content = read_json(path)
        version = content.get("version") if isinstance(content, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{path} was written by another version of vestige (format {version}, this one reads "
                f"{FORMAT_VERSION}): use that version, or start a new folder"
            )
        written = content.get("specification")
        if isinstance(written, dict):  # before 0.3 every rate was chosen once, for all seeds
            written = {"choose": "once", **written}
        try:
            return Specification.from_json(written)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}; restore a copy, or start a new folder") from error

    def records(self) -> dict[str, RunRecord]:
        """Every run of this comparison that is on record, by id; what cannot be read is named in `unreadable`.

        A record never changes once it is written, so each file is read once.
        """
        if self._belongs is None and (self.path / "spec.json").exists():
            self._belongs = membership(self.specification())
        for path in sorted(self.runs.glob("*.json")):
            if path.stem in self._read or path.name.startswith("."):
                continue
            try:
                self._read[path.stem] = self._read_record(path)
            except (OSError, ValueError) as error:
                kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
                self.unreadable[path.name] = f"{kind}{error}"
            else:
                self.unreadable.pop(path.name, None)
        return dict(self._read)

    def _read_record(self, path: Path) -> RunRecord:
        record = read_record(json.loads(path.read_text()))
        if record.id != path.stem:
            raise ValueError("its name is not the hash of the run that it describes")
        if self._belongs is not None and not self._belongs(record.run):
            raise ValueError(f"foreign: {record.run} is no run of this comparison")
        return record

    def write(self, record: RunRecord) -> None:
        """Make a record durable. One that is on record already is kept."""
        path = self.runs / f"{record.id}.json"
        if not path.exists() or path.name in self.unreadable:
            write_json(path, record.to_json())

    def remove_failures(self) -> list[FailedRun]:
        """Remove the records of failed runs, so that they are tried again."""
        removed = failed(self.records().values())
        for record in removed:
            (self.runs / f"{record.id}.json").unlink(missing_ok=True)
            del self._read[record.id]
        return removed


def _compared(specification: Specification) -> object:
    """As it would be read back, without the paths of the data, which may differ from machine to machine."""
    nowhere = tuple(replace(problem, data=None) for problem in specification.problems)
    content = json.loads(json.dumps(replace(specification, problems=nowhere).to_json()))
    return Specification.from_json(content).to_json()
