"""Which float32 products may a GPU round to TF32? Those that the user allowed, by either of torch's interfaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

SLACK = 1 / (1 + 2**-10) ** 2
"""TF32 may round both factors of a product up, each by 2^-10. Clipping factors times this keep an example's share of a
sum within its bound all the same."""

MARGIN = 2**-8 * (1 + 2**-4)
"""A sum of products in TF32 may be wrong by 2^-9 of the sum of its terms' norms, however much the terms cancel: once
where its norm is computed, and once where it is added to the total. The sixteenth is for the accumulators. A norm plus
this share of its terms' norms bounds what is added, so no example passes the bound by rounding."""

# torch 2.9 added a second interface, and reading the older one is an error once the newer one was used.


def tf32_products() -> bool:
    return _allowed(torch.backends.cuda.matmul, torch.backends.cuda.matmul)


def tf32_convolutions() -> bool:
    return _allowed(getattr(torch.backends.cudnn, "conv", None), torch.backends.cudnn)


def _allowed(newer: object, older: Any) -> bool:
    precision = getattr(newer, "fp32_precision", None)
    return bool(older.allow_tf32) if precision is None else precision == "tf32"


def slack(into: Tensor) -> float:
    """The factor that keeps an example's share of a sum in this tensor within its bound."""
    return SLACK if into.is_cuda and (tf32_products() or tf32_convolutions()) else 1.0


def multiplies_in_tf32(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float64 and tf32_products()


def convolves_in_tf32(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float64 and tf32_convolutions()


@contextmanager
def products_in_tf32(allowed: bool) -> Iterator[None]:
    """Inside, allow TF32 matrix products, or forbid them whatever the user's settings are."""
    with _tf32(torch.backends.cuda.matmul, torch.backends.cuda.matmul, allowed):
        yield


@contextmanager
def without_tf32() -> Iterator[None]:
    """Inside, neither products nor convolutions nor recurrent layers round to TF32, and both of torch's interfaces say
    so: a model may ask either."""
    newer = hasattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision")
    with products_in_tf32(False), ExitStack() as stack:
        for kind in ("conv", "rnn") if newer else ():
            stack.callback(torch._C._set_fp32_precision_setter, "cuda", kind, _precision(kind))
        with suppress(RuntimeError):  # where the newer one was used, the older one may have no answer
            stack.enter_context(_tf32(None, torch.backends.cudnn, False))
        for kind in ("conv", "rnn") if newer else ():
            torch._C._set_fp32_precision_setter("cuda", kind, "ieee")
        yield


def _precision(kind: str) -> str:
    return torch._C._get_fp32_precision_getter("cuda", kind)


@contextmanager
def _tf32(newer: object, older: object, allowed: bool) -> Iterator[None]:
    value: bool | str = allowed
    owner, name = older, "allow_tf32"
    if hasattr(newer, "fp32_precision"):
        owner, name, value = newer, "fp32_precision", "tf32" if allowed else "ieee"
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@cache
def triton_available() -> bool:
    """Whether our Triton kernels can run here."""
    return torch.cuda.is_available() and find_spec("triton") is not None


def check_device(device: str) -> None:
    if device.split(":")[0] == "meta":
        raise ValueError(f"device={device!r} cannot be used: it holds no numbers; give cpu or cuda")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device!r} cannot be used: {error}") from error


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
