"""Which processes train this model, and how is it divided among them? Found out before anything is asked.

torchrun's environment, or a group that the user has initialised, says how many processes there are. A model that
DistributedDataParallel wraps is taken out of it: its gradients must not be added up before they are clipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vestige.processes.group import ALONE, Group, Processes, answered, digest
from vestige.processes.parameter_shards import of_fsdp
from vestige.processes.torchrun import launched

_group: Group | None = None


def processes(device: torch.device | str | None = None) -> Processes:
    """The processes that train together: those of torch's default group, which is made where torchrun has started
    several and none has been made yet. Together, at its first call."""
    global _group
    if not dist.is_available():
        return ALONE
    if not dist.is_initialized():
        if not launched():
            return ALONE
        kind = torch.device(device or "cpu").type
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if "MASTER_ADDR" not in os.environ:
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} and RANK are set, and MASTER_ADDR is not: start the processes "
                "by torchrun, or unset these for one process"
            )
        with answered():
            dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    if _group is None or _group.world is not dist.group.WORLD:
        _group = Group()
    return _group


def require_same_group(group: Processes) -> None:
    """At every step: processes may not appear or disappear during a run."""
    now = dist.is_available() and dist.is_initialized()
    if not group.several:
        if launched() or (now and dist.get_world_size() > 1):
            raise ValueError(
                "this run began in one process, and now there are several: each would train on its own. Start all of "
                "them by torchrun, before the run is made"
            )
    elif not now or dist.group.WORLD is not group.world:  # type: ignore[attr-defined]
        raise ValueError("the process group that this run began with is gone, so it cannot go on: start it again")


REFUSED = {
    "DataParallel": "nn.DataParallel splits every batch between threads: use one process for each GPU, by torchrun",
    "FullyShardedDataParallel": "FullyShardedDataParallel is FSDP1: shard the model by "
    "torch.distributed.fsdp.fully_shard",
}


def unwrapped(module: nn.Module) -> nn.Module:
    """The model itself. DistributedDataParallel around it is set to add nothing up: sums are made of clipped gradients
    here, and what it would add up has not been clipped."""
    kind = type(module).__name__
    if kind in REFUSED:
        raise ValueError(f"model: {REFUSED[kind]}")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        _silence(module)
        return unwrapped(module.module)
    for each in module.modules():
        if type(each).__name__ in (*REFUSED, "DistributedDataParallel"):
            raise ValueError(
                f"model: a part of it is wrapped in {type(each).__name__}: wrap the whole model, or nothing"
            )
    return module


def _silence(wrapper: nn.parallel.DistributedDataParallel) -> None:
    wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False


def silence_wrapper() -> None:
    """Inside a pass of a private model: a DistributedDataParallel that was put around it since adds nothing up either,
    sends no buffers, and looks for no unused parameters: one process may have more passes than another, and would wait
    for messages that are never sent."""
    wrapper = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is not None:
        _silence(wrapper)


def sharded(module: nn.Module) -> bool:
    """Whether the model's parameters are divided among processes, also while FSDP2 has gathered them for a pass."""
    return any(hasattr(parameter, "placements") for parameter in module.parameters()) or fsdp_in(module.modules())


def fsdp_in(modules: Iterable[nn.Module]) -> bool:
    """Whether `fully_shard` was called for one of these modules; asked at every pass of a loop."""
    return any(map(of_fsdp, {type(each) for each in modules}))


def follow_first(module: nn.Module, group: Processes) -> None:
    """Together: the model of every process becomes that of process 0, if they have the same parameters at all; of a
    sharded one the buffers do."""
    if not group.several:
        return
    tensors: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    kinds = [
        [name, list(t.shape), str(t.dtype), "trained" if t.requires_grad else "kept"] for name, t in tensors.items()
    ]
    group.agree({"the model's number of parameters": len(kinds), "the model": kinds})
    group.follow(t for t in tensors.values() if not hasattr(t, "placements"))  # of rows each process has its own


OTHER_ROWS = (
    "their examples are not the same, or not in the same order. Each process takes the rows whose indices are its own, "
    "so one example could be counted twice: sort what is listed from a folder, give random_split a seeded generator"
)


def require_same_rows(group: Processes, nonprivate_hash: Callable[[bytes], int]) -> None:
    """Together: refuse processes with other examples, by hashes with a key that is drawn for this and forgotten."""
    if group.several:
        key = group.secret().to_bytes(32)
        group.same(group.together(lambda: nonprivate_hash(key)), OTHER_ROWS)


COME_APART = (
    "their models are not the same after step {step}. Every process must make the same steps and change nothing in "
    "between: what one of them has done to its weights, the others have not"
)


def require_same_model(group: Processes, tensors: Iterable[Tensor], step: int) -> None:
    """Collective: check that the replicas' parameters are equal."""
    if group.several:
        group.same(digest_of(tensors), COME_APART.format(step=step))


def loss_of(loss: object) -> list[str]:
    """What identifies a loss: its name, and its code where it is a function."""
    code = getattr(loss, "__code__", None)
    name = getattr(loss, "__qualname__", None) or repr(loss)
    return [str(getattr(loss, "__module__", "")), name, "" if code is None else f"{digest(code.co_code.hex()):x}"]


def digest_of(tensors: Iterable[Tensor]) -> int:
    """A fingerprint of parameters that differs with any bit, for the price of a sum over them."""
    sums = [t.detach().contiguous().reshape(-1).view(torch.int32).sum(dtype=torch.int64) for t in tensors]
    return digest(torch.stack(sums).tolist())
