"""What do the canaries of one run show? At least so much epsilon with a confidence, beside the accountant's at most."""

from __future__ import annotations

from pathlib import Path

from vestige.run_records import RunResult
from vestige.training.results import OneRun
from vestige.training.run_folder import RunFolder


def read(path: str | Path) -> OneRun:
    """The audit that a run's folder holds."""
    folder = RunFolder(path)
    content = folder.result()
    if content is None and (folder.path / "synthesis.json").is_file():
        raise ValueError(
            f"run={str(path)!r} is a made-up table, in which nothing is planted: attack it by --membership synthetic "
            "--data FILE --others FILE"
        )
    if content is None:
        raise ValueError(f"run={str(path)!r} holds no finished run: there is no result.json in it")
    result = RunResult.from_json(content)
    if result.audit is None:
        raise ValueError(
            f"run={str(path)!r} kept no canaries: plant some with vestige train --audit 1000, or attack its method by "
            f"vestige audit --method {result.method}"
        )
    stated = result.statement
    return OneRun(str(path), result.method, result.audit, stated.epsilon, stated.delta, result.assumptions)


__all__ = ["OneRun", "read"]
