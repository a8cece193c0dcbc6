"""How do processes work for a command, and leave with it?"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


def hire(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a process. Ctrl-C is its employer's to answer; dismissed, it lets go of what it holds and says nothing."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(target, *arguments), daemon=True)
    with _deaf_to_ctrl_c():
        process.start()
    return process


def dismiss(staff: Sequence[BaseProcess]) -> None:
    """End the processes that still run, and wait for all."""
    for process in staff:
        if process.is_alive():
            process.terminate()
    for process in staff:
        process.join()


def _serve(target: Callable[..., None], *arguments: object) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    target(*arguments)


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """A process begun here never sees Ctrl-C, not even while it loads; here it is only put off."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # which the first process would start, and which lets Ctrl-C in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
