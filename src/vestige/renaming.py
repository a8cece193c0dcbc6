"""How does an earlier name of an argument or a module keep working? It becomes the new name, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from vestige.checks import python_number

P = ParamSpec("P")
R = TypeVar("R")


class Now(NamedTuple):
    """What took the place of an argument, and what its earlier values are called."""

    name: str
    values: Mapping[Any, Any] | None = None
    """None: the value stays as it is."""
    stays: bool = False
    """Whether the earlier argument is still there, for other values than these."""


CLIP = {"clip": Now("max_grad_norm")}
PARTS = {"physical_batch": Now("max_physical_batch_size")}
NOISE = {"noise": Now("secure_mode", {"lattice": True, "float32": False})}
GRAPHS = {"engine": Now("cuda_graphs", {"unrecorded": False}, stays=True)}
VALIDATION = {"public": Now("validation_data")}


def current(arguments: Mapping[str, object], earlier: Mapping[str, Now], stacklevel: int = 3) -> dict[str, object]:
    """The arguments by their present names; each earlier one is named in a FutureWarning.

    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     current({"physical_batch": 8, "lr": 1}, PARTS)
    {'lr': 1, 'max_physical_batch_size': 8}
    """
    found = dict(arguments)
    for old, now in earlier.items():
        if old not in found or (now.stays and found[old] not in (now.values or ())):
            continue
        value = found.pop(old)
        if now.values is not None and value not in now.values:
            raise ValueError(f"{old}={value!r} is unknown; choose from {', '.join(now.values)}")
        if now.name in found:
            raise ValueError(f"{old}={value!r} is the earlier name of {now.name}: give {now.name} alone")
        found[now.name] = value if now.values is None else now.values[value]
        said = f"{old}={value!r}" if now.values is not None else old
        becomes = f"{now.name}={found[now.name]!r}" if now.values is not None else now.name
        warnings.warn(f"{said} is called {becomes} now; the earlier name goes with 0.4", FutureWarning, stacklevel)
    return found


def renamed_arguments(*earlier: Mapping[str, Now]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare that a function takes earlier names of its arguments too, and numbers of numpy."""
    known = {old: now for each in earlier for old, now in each.items()}

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            named = {name: python_number(value) for name, value in current(kwargs, known).items()}
            return function(*args, **named)  # type: ignore[arg-type]

        return call

    return declare


def earlier_attribute(old: str, new: str) -> None:
    """Warn that an attribute has another name now."""
    warnings.warn(f"{old} is called {new} now; the earlier name goes with 0.4", FutureWarning, stacklevel=3)


MODULES = {
    "vestige.questions": "vestige.priced_questions",
    "vestige.balance": "vestige.layerwise_scaling",
    "vestige.randomness.release": "vestige.randomness.sum_and_release_types",
}


class RenamedModules(MetaPathFinder, Loader):
    """An importer of modules by their earlier names: each is the module of its present name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        message = f"{fullname} is called {MODULES[fullname]} now; the earlier name goes with 0.4"
        warnings.warn(message, FutureWarning, stacklevel=2)
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(MODULES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its present name, which the import system has just overwritten."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
