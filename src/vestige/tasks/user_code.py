"""What does a user's FILE.py:FUNCTION return? It is called with the arguments it takes; its errors name its lines."""

from __future__ import annotations

import importlib.util
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def python_file(name: str) -> tuple[Path, str]:
    file, _, function_name = name.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"--task={name}: no such file; give path/to/file.py:function")
    return Path(file), function_name


@contextmanager
def blame(name: str, what: str) -> Iterator[None]:
    """Inside, an error of the user's own code becomes one line that says where in their file it came from."""
    file = Path(name.rpartition(":")[0]).resolve()
    try:
        yield
    except ValueError:
        raise  # it already says what is wrong, be it our message or the user's
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
        where = f" (line {lines[-1]})" if lines else ""
        raise ValueError(f"--task={name}: {what}{where}: {type(error).__name__}: {error}") from error


def function_of(name: str) -> Callable[..., object]:
    """Run FILE.py and find its FUNCTION."""
    file, function_name = python_file(name)
    with blame(name, "the file cannot be run"):
        spec = importlib.util.spec_from_file_location(f"vestige_user_task_{file.stem}", file)
        if spec is None or spec.loader is None:
            raise ValueError(f"--task={file}:{function_name}: not a Python file; give path/to/file.py:function")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = getattr(module, function_name, None)
        if not callable(function):
            raise ValueError(
                f"--task={file}:{function_name}: the file defines no function {function_name!r}; name one it has"
            )
        return function  # type: ignore[no-any-return]


def call(name: str, function: Callable[..., object], data: Path | None, seed: int) -> object:
    """Call the function with those of `data` and `seed` that it takes."""
    _, function_name = python_file(name)
    accepted = inspect.signature(function).parameters
    if data is not None and "data" not in accepted:
        raise ValueError(f"--data={data}: {function_name}() takes no argument 'data'; add one or leave --data out")
    arguments: dict[str, object] = {"data": data, "seed": seed}
    with blame(name, f"{function_name}() failed"):
        return function(**{key: value for key, value in arguments.items() if key in accepted})
