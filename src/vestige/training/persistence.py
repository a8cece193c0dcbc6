"""How does a run survive its process? Its folder is opened, checkpointed and restored; its ledger never shrinks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from vestige.accounting.ledger import Ledger, LedgerError
from vestige.assumptions import EARLIER_ADJACENCY
from vestige.engines.audit_canaries import Canaries
from vestige.mechanism.curator import Curator
from vestige.priced_questions import answers_first, require_same_answers
from vestige.processes import checkpoints
from vestige.processes.group import Processes
from vestige.processes.parameter_shards import Shards
from vestige.randomness.correlated import NoiseSequence
from vestige.training.loop import TrainingState
from vestige.training.planning import Request
from vestige.training.run_folder import RunFolder


class Persistent(Protocol):
    """What a checkpoint stores of a run, besides its ledger."""

    state: TrainingState
    curator: Curator
    normalised: bool
    ledger: Ledger
    canaries: Canaries | None
    group: Processes
    shards: Shards | None

    def noise_from_here(self) -> NoiseSequence:
        """The noise of the steps that are left, begun anew."""
        ...


def start(run: Persistent, folder: RunFolder | None, public: dict[str, object], request: dict[str, object]) -> None:
    """Begin a new run: claim its folder, write its request and its first checkpoint, open its ledger."""
    if folder is not None:
        folder.create({**request, "public": public})
    _open(run, folder, public)


def begun(folder: RunFolder) -> dict[str, Any]:
    """The public facts that a run was begun with. Its ledger has them sealed: `run.json` must say the same."""
    public = folder.request().get("public")
    if not isinstance(public, dict):
        raise ValueError(f"{folder.path / 'run.json'} does not say what the run was begun with: it was changed")
    for key, was in _opened(folder.ledger).items():
        if public.get(key) != was:
            raise ValueError(
                f"{folder.path / 'run.json'}: {key} is {public.get(key)!r}, but the ledger was opened with {was!r}: "
                "the file was changed; restore it, or start a new run"
            )
    return public


def _opened(ledger: Path) -> dict[str, object]:
    """What the first row of a ledger says of its run; nothing where there is no such row, which its claim will tell."""
    try:
        with ledger.open(encoding="utf-8") as rows:
            first = json.loads(rows.readline())
    except (OSError, ValueError):
        return {}
    if not isinstance(first, dict) or first.get("row") != "open":
        return {}
    # The name is the ledger's own, and the method is compared by `check_same`.
    apart = ("seq", "previous", "row", "version", "hash", "name", "method")
    return {key: value for key, value in first.items() if key not in apart}


def continued(request: Request, public: dict[str, Any]) -> Request:
    """The request with the noise and the automatic rate that the run was started with: calibrated again, by another
    version of the accountant, or measured again, on another machine or on the weights before a prior's, they could be
    others."""
    if request.lr == "auto" and public["lr_reason"].startswith("lr auto"):
        request = replace(request, begun_at=(public["lr"], public["lr_reason"]))
    if request.noise_multiplier is not None:
        return request
    return replace(request, noise_multiplier=public["noise_multiplier"], steps=request.steps or public["steps"])


def resume(run: Persistent, folder: RunFolder, public: dict[str, object]) -> None:
    """Continue a run from its last checkpoint; all questions asked since stay charged."""
    group = run.group
    check_same(group.first(lambda: begun(folder)), public)
    if group.first(folder.checkpoint.exists):
        _restore(run, folder)
        return
    if group.first(folder.ledger.exists):
        # The first checkpoint is written before the first question, so a run killed before it has asked nothing.
        run.ledger.hold()
        group.first(lambda: _remove_unasked(folder))
        run.ledger.close()
    group.first(lambda: folder.require_asked(-1))
    _open(run, folder, public)


def asked(folder: RunFolder) -> bool:
    """Whether any question was charged there."""
    return b'"row": "ask"' in folder.ledger.read_bytes()


def _remove_unasked(folder: RunFolder) -> None:
    if asked(folder):
        raise LedgerError(f"{folder.ledger} exists but there is no checkpoint beside it to resume from")
    folder.ledger.unlink()


def saver(run: Persistent, folder: RunFolder) -> Callable[[], None]:
    """A function that writes a checkpoint whenever it is called."""

    def save() -> None:
        content = {
            "state": run.state.state_dict(),
            "asked": run.curator.asked,
            "compared": run.curator.comparisons.asked if run.curator.comparisons else 0,
            "normalised": run.normalised,
            **({} if run.canaries is None else {"canaries": run.canaries.state_dict()}),
            "ledger_rows": run.ledger.rows,
            "ledger_head": run.ledger.head,
        }
        if run.shards is not None:
            # Under a new name: the file that names it is replaced when all processes have written their rows.
            name = f"{SHARDED}{run.ledger.attempt}-{run.state.step}-{run.ledger.rows}"
            content = {**checkpoints.save(folder.path / name, content, run.shards), "rows": name}
        folder.save_checkpoint(content)
        if run.shards is not None:
            run.group.first(lambda: folder.remove_all_but(str(content["rows"]), SHARDED))

    return save


SHARDED = "checkpoint-rows-"
"""Folders in which processes keep their rows of a sharded run's state."""


def _open(run: Persistent, folder: RunFolder | None, public: dict[str, object]) -> None:
    run.ledger.open(public)
    if folder is not None:
        saver(run, folder)()


NEWER = {"arithmetic": "float32"}
"""What runs did that were written before a key was: 0.1 added noise in float32."""
NEWER_OPTIONS: dict[str, dict[str, object]] = {
    "sma-dp-sgd": {"spectrum_lag": 0, "shuffled": False, "clip_per_layer": False},
    **{name: {"beta_end": None, "beta_epochs": 100} for name in ("fo-dp-sgd", "post-fm")},
}
"""The same for options of methods: until 0.2 every step waited for its spectrum."""

CHANGED_DEFAULTS = {"dp-bandmf": ("bands",), "sma-dp-sgd": ("refresh_spectrum", "spectrum_lag")}
"""Options whose default is another one now: a run that was started with the earlier one keeps it. Until 0.3 noise had 4
bands, and SMA-DP-SGD took one spectrum an epoch."""


def check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume with other settings than at the start: what was priced must be what is asked."""
    for key, value in answers_first(now):
        was = require_same_answers(key, before.get(key, NEWER.get(key)), value)
        if key in ("coordinates", "noise_strategy", "owners") and was is None:
            continue  # not written down before 0.2 and 0.3
        if key == "adjacency" and was == EARLIER_ADJACENCY:
            continue  # the same prices, which hold for it too
        if key == "method" and isinstance(was, str):
            # Before 0.2 a method was stored as its repr, with class names: only its own name can be compared.
            was = {**value, "name": (re.findall(r"name='([^']+)'", was) or [was])[0]}
        elif key == "method" and was is not None:
            was = {**was, "options": {**NEWER_OPTIONS.get(was["name"], {}), **was["options"]}}
        if was != value:
            raise ValueError(f"resume: {key} is {value!r} now but was {was!r}; resume with the same settings")


def _restore(run: Persistent, folder: RunFolder) -> None:
    saved = folder.load_checkpoint()
    if ("rows" in saved) != (run.shards is not None):
        how = "sharded by fully_shard" if "rows" in saved else "replicated"
        raise ValueError(f"resume: the model was {how} when the run began; resume it so, on any number of processes")
    if run.shards is not None:
        saved = checkpoints.load(folder.path / saved["rows"], saved, run.shards)
    history = run.ledger.claim()
    if history.heads[saved["ledger_rows"] - 1 : saved["ledger_rows"]] != [saved["ledger_head"]]:
        raise LedgerError(
            f"{folder.ledger} does not contain what the checkpoint was trained on: it was cut or replaced"
        )
    run.group.first(lambda: folder.require_asked(history.last_step))
    run.state.load_state_dict(saved["state"])
    run.normalised = saved["normalised"]
    if run.canaries is not None:
        run.canaries.load_state_dict(saved["canaries"])
    # A secret run draws from a new key; a reproducible one must continue the same streams.
    run.curator.asked = saved["asked"]
    if run.curator.comparisons is not None:
        run.curator.comparisons.asked = saved["compared"]
    run.curator.continue_noise(run.noise_from_here)
    run.ledger.resume(run.state.step)
