"""What do the tests share? Small models and data, and a float64 oracle that knows nothing of the package."""

from __future__ import annotations

import gc
import importlib
import os
import random
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn
from torch.overrides import _pop_mode as _pop_function_mode
from torch.utils._python_dispatch import _pop_mode

from vestige.privacy_engine.row_labels import Tracking

pytest.register_assert_rewrite(
    "commands", "engine_checks", "selective_runs"
)  # what they assert is explained when it fails

AT_NIGHT = "VESTIGE_TESTS_AT_NIGHT"
"""Where it is set, keys come from the operating system, as for users."""
KEYS = random.Random()
if AT_NIGHT not in os.environ:
    _HERE, _ANEW = os.getpid(), secrets.randbits
    secrets.randbits = lambda bits: KEYS.getrandbits(bits) if os.getpid() == _HERE else _ANEW(bits)
    settings.register_profile("everyday", derandomize=True)
    settings.load_profile("everyday")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every day a test draws the same secret keys, so that one that passes once passes again."""
    KEYS.seed(item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `everyday(case, ...)` the other cases are slow, of one marked `nightly(case, ...)` these are: the
    same behaviour at other values."""
    cases: dict[tuple[str, str], dict[str, pytest.Item]] = {}
    for item in items:
        for mark in item.iter_markers():
            if mark.name in ("everyday", "nightly") and (case := getattr(item, "callspec", None)) is not None:
                cases.setdefault((item.nodeid.partition("[")[0], mark.name), {})[case.id] = item
    for (test, mark), found in cases.items():
        named = next(iter(found.values())).get_closest_marker(mark).args
        if not any("[" in chosen for chosen in config.args) and (unknown := set(named) - set(found)):
            raise pytest.UsageError(f"{test} has no case {', '.join(sorted(unknown))}: it has {', '.join(found)}")
        for case, item in found.items():
            if (case in named) == (mark == "nightly"):
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, the files of tests/processes go to one worker: what they start is started once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/processes" if file.startswith("tests/processes/") else file

    return ByFile(config, log)


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_stays() -> None:
    """What was imported, or made before this file, stays: a garbage collection need not look at it again, and takes
    milliseconds, not half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_disk_is_awaited() -> Iterator[None]:
    """Tests kill processes, and never the machine: nothing is gained by waiting for a disk thousands of times."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                patched.setattr(os, name, lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _absent_devices_have_no_seed() -> Iterator[None]:
    """Without a GPU, torch.manual_seed writes down a stack for each kind of device that might come: milliseconds."""
    with pytest.MonkeyPatch.context() as patched:
        if not torch.cuda.is_available():
            patched.setattr(torch, "manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed)))
        yield


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    # On a GPU torch rounds convolutions to TF32 unless told otherwise; an oracle does not.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def _no_loop_stays_on() -> None:
    """A loop that ended in an error is followed until its engine is gone, and one that rests as long as something of its
    examples is. What a test keeps of them would slow down all tests after it."""
    if torch._C._len_torch_dispatch_stack():
        torch.ones(1, requires_grad=True).sum().backward()  # autograd keeps what failed until the next pass
    for generation in (1, 2):  # most of it is young
        if torch._C._len_torch_dispatch_stack():
            gc.collect(generation)
            Tracking.clean_up()
    for loop in Tracking._at_rest[:]:
        if not loop._off():  # of another thread
            loop._rested()
    while torch._C._len_torch_dispatch_stack():
        _pop_mode()
    while torch._C._len_torch_function_stack():
        _pop_function_mode()
    Tracking._over.clear()
    Tracking._several.clear()
    Tracking.labels.__init__()
    torch._C._set_multithreading_enabled(True)


@pytest.fixture(scope="module")
def bench() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script of bench/ by name."""
    folder = str(Path(__file__).parents[1] / "bench")
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)


@pytest.fixture
def toy() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return make_toy()


def make_toy(
    examples: int = 60, features: int = 5, classes: int = 3, seed: int = 0
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(features, 7), nn.Tanh(), nn.Linear(7, classes))
    inputs = torch.randn(examples, features, generator=generator)
    targets = torch.randint(classes, (examples,), generator=generator)
    return model, (inputs, targets)


def example_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> np.ndarray:
    """Per-example gradients of the cross-entropy, one backward pass at a time, flat, float64."""
    double = [p.detach().double().requires_grad_() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    rows = []
    for x, y in zip(inputs, targets, strict=True):
        output = torch.func.functional_call(model.double(), dict(zip(names, double, strict=True)), (x.double()[None],))
        gradients = torch.autograd.grad(nn.functional.cross_entropy(output, y[None]), double)
        rows.append(np.concatenate([g.numpy().ravel() for g in gradients]))
    model.float()
    return np.stack(rows) if rows else np.zeros((0, sum(p.numel() for p in double)))


def clip_and_sum(rows: np.ndarray, bound: float) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows * np.minimum(1, bound / np.maximum(norms, 1e-300))).sum(0)
