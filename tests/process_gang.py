"""What do tests of several processes share? Processes that wait for work, and the work: runs of small models."""

from __future__ import annotations

import gc
import os
import time
import traceback
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige

LOSS = nn.functional.cross_entropy
METHODS = ("dp-sgd", "fo-dp-sgd", "sma-dp-sgd", "dp-adamw", "disk", "dpsur", "dp-bandmf")


class Failed:
    """An error that a process met."""

    def __init__(self, error: BaseException) -> None:
        self.kind, self.message, self.trace = type(error).__name__, str(error), traceback.format_exc()

    def __repr__(self) -> str:
        return f"{self.kind}: {self.message}\n{self.trace}"


class Gang:
    """So many processes of one gloo group, each of which does what it is sent."""

    def __init__(self, size: int, limit: float = 60.0) -> None:
        # A server that has imported everything forks them: that is faster than to start each anew.
        context = multiprocessing.get_context("forkserver")
        preloaded = "vestige.training.run vestige.privacy_engine.engine torch.distributed.fsdp torch._dynamo"
        preloaded += " vestige.finetuning.job peft accelerate lightning.pytorch"  # those that are installed
        context.set_forkserver_preload(preloaded.split())
        meeting = Path(mkdtemp()) / "meeting"
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, str(meeting), limit, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def send(self, task: Any, *args: Any, each: Any = None, **named: Any) -> None:
        """`each` has further named arguments by rank."""
        for rank, pipe in enumerate(self.pipes):
            pipe.send((task, args, {**named, **({} if each is None else each[rank])}))

    def answers(self, seconds: float = 120.0) -> list[Any]:
        """What each has made of it: None of one that is gone."""
        found = []
        for pipe in self.pipes:
            assert pipe.poll(seconds), "a process hangs"
            try:
                found.append(pipe.recv())
            except (EOFError, OSError):
                found.append(None)
        return found

    def __call__(self, task: Any, *args: Any, **named: Any) -> list[Any]:
        self.send(task, *args, **named)
        return self.answers()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)


def _serve(rank: int, size: int, meeting: str, limit: float, pipe: Any) -> None:
    os.environ["VESTIGE_PROCESS_TIMEOUT"] = str(limit)
    gc.freeze()  # what was imported stays
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    while True:
        try:
            task, args, named = pipe.recv()
        except EOFError:
            return
        try:
            found = task(*args, **named)
        except BaseException as error:
            found = Failed(error)
        pipe.send(found)


# --- the work ---------------------------------------------------------------------------------------------------------


def data(examples: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(examples, 5, generator=random), torch.randint(3, (examples,), generator=random)


def network(seed: int = 1) -> nn.Module:
    """With weights that have a spectrum, and rows that four processes cannot share evenly."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3))


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0])  # type: ignore[index]
    fully_shard(model)
    return model


def whole(parameter: Any) -> torch.Tensor:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([whole(p).ravel() for p in model.parameters()])


def train(
    method: Any = "dp-sgd",
    *,
    kind: str = "replicated",
    examples: int = 60,
    data_seed: int = 0,
    model_seed: int = 1,
    stop: int | None = None,
    pause: float = 0.0,
    computed: str | None = None,
    drift: float = 0.0,
    spoil: str | None = None,
    arrange: str | None = None,
    loss: Any = LOSS,
    late: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A run of the small network: its parameters after every step, and what the ledger says."""
    torch.distributed.is_initialized() and torch.distributed.barrier()
    model = network(model_seed)
    if kind == "sharded":
        model = sharded(model)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if callable(method):
        method = method()
    given = {"noise_multiplier": 1.0, "delta": 1e-3, "sample_rate": 0.25, "steps": 6, "reproducible": 3, **options}
    rows = data(examples, data_seed)
    if arrange is not None:
        rows = ARRANGED[arrange](rows)
    training = vestige.train(model, loss, rows, method=method, **given)
    if computed is not None:
        _note(training.curator, computed)
    if spoil is not None:
        SPOILED[spoil](training)
    path = []
    for record in training:
        path.append(flat(model))
        time.sleep(pause)
        with torch.no_grad():
            if late is None or record.step == late:
                next(model.parameters()).add_(drift)
        if record.step == stop:
            break
    training.ledger.close()  # this process lives on, and others go on with the run
    return {
        "path": torch.stack(path) if path else torch.zeros(0),
        "head": sorted((repr(question), count) for question, count in training.ledger.spent.items()),
        "asked": sum(training.ledger.spent.values()),
        "epsilon": training.guarantee().epsilon_if_noise_were_secret,
        "accuracy": training.private_accuracy,
        "gate": {k: v for k, v in training.state.gate.items() if k in ("accepted", "rejected")},
        "memory": {k: tuple(v.shape) for k, v in training.state.learner.memory.items() if torch.is_tensor(v)},
    }


def _note(curator: Any, file: str) -> None:
    """Write a line whenever an answer is about to be computed."""
    compute = curator._sum

    def noted(*args: Any, **named: Any) -> Any:
        with open(f"{file}-{curator._group.rank}", "a") as log:
            log.write("computed\n")
        return compute(*args, **named)

    curator._sum = noted


def _clipped_by_process(training: Any) -> None:
    """WRONG, for a test: the sum of a process's examples is clipped, and not each example."""
    from vestige.mechanism.adaptive_clipping import FixedClip
    from vestige.mechanism.clipping import RunningSum

    total, bound = RunningSum.total, training.method.clip.bound

    def clipped(self: Any) -> torch.Tensor:
        found = total(self)
        return found * (bound / found.norm()).clamp(max=1.0)

    curator, compute = training.curator, training.curator._sum

    def wrong(sample: Any, parameters: Any, clip: Any, *args: Any) -> Any:
        RunningSum.total = clipped
        try:
            return compute(sample, parameters, _Unbounded(clip), *args)
        finally:
            RunningSum.total = total

    class _Unbounded(FixedClip):
        def __init__(self, clip: Any) -> None:
            self.clip = clip

        def factors(self, norms: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(norms)

        def sensitivity(self, layout: Any) -> Any:
            return self.clip.sensitivity(layout)

    curator._sum = wrong


def _noise_by_every_process(training: Any) -> None:
    """WRONG, for a test: every process draws from the key's own stream, so parts have the same noise."""
    from vestige.processes.sums import Sums

    Sums._stream = lambda self, randomness, purpose, index, keeps: randomness.stream(purpose, index)  # type: ignore


SPOILED = {"clipped by process": _clipped_by_process, "one noise": _noise_by_every_process}


def noise(kind: str = "replicated", arithmetic: str = "lattice", width: int = 4000, spoil: bool = False) -> Any:
    """The noise of two questions about nobody, with a secret key: what this process has of it."""
    from vestige.layout import Layout
    from vestige.processes.distributed_setup import processes
    from vestige.processes.parameter_shards import Shards
    from vestige.processes.sums import ShardedSums, Sums
    from vestige.randomness.correlated import Independent
    from vestige.randomness.keys import Randomness

    group = processes()
    key, found = Randomness.shared(1234567), []
    stream = Sums._stream
    if spoil:
        _noise_by_every_process(None)
    for index in (0, 1):
        if kind == "replicated":
            made = Sums(group).noised(torch.zeros(2 * width), 2.0, Independent(arithmetic), 1.5, key, "noise", index)
        else:
            model = sharded(nn.Sequential(nn.Linear(width, 2, bias=False)))
            shards = Shards(model, group)
            shards.lay_out(Layout.of(shards.skeleton))
            sums = ShardedSums(group, shards)
            running = sums.sum(Independent(arithmetic), 2.0, 1.5, torch.device("cpu"))
            running.nothing()
            made = sums.noised(running.total(), 2.0, Independent(arithmetic), 1.5, key, "noise", index)
            made = (group.joined(_even(made[0], width)), *made[1:])
        found.append(made[0])
    Sums._stream = stream  # type: ignore[method-assign]
    return torch.stack(found), made[1]


def _even(part: torch.Tensor, width: int) -> torch.Tensor:
    """The part of a process, as long as any other's: those that have none are left out by whoever reads it."""
    return torch.cat([part, part.new_zeros(max(0, width - len(part)))])


def exchanged(rows: Any) -> Any:
    """Two rows in each other's place."""
    order = torch.arange(len(rows[1]))
    order[[1, 2]] = order[[2, 1]]
    return tuple(part[order] for part in rows)


class Read(torch.utils.data.Dataset):
    """Rows that are read one by one, and turned a little as they are."""

    def __init__(self, rows: Any, shift: int = 0) -> None:
        self.rows, self.shift = rows, shift

    def __len__(self) -> int:
        return len(self.rows[1])

    def __getitem__(self, row: int) -> Any:
        row = (row + self.shift) % len(self)
        return self.rows[0][row] + 1e-3 * torch.randn(()), self.rows[1][row]


class Torn(Read):
    """Two rows cannot be read, and one has a label that the loss cannot take."""

    def __getitem__(self, row: int) -> Any:
        if row in (3, 17):
            raise OSError("torn")
        return self.rows[0][row], self.rows[1][row] + 99 * (row == 40)


def large(rows: tuple[torch.Tensor, torch.Tensor], blank: slice = slice(0)) -> tuple[torch.Tensor, torch.Tensor]:
    """Every gradient is clipped, but for rows that are blank: they have none."""
    inputs = 30 * rows[0]
    inputs[blank] = torch.nan
    return inputs, rows[1]


ARRANGED = {
    "torn": Torn,
    "large": large,
    "without one of four rows": lambda rows: large(rows, slice(12, 16)),
    "without one of one row": lambda rows: large(rows, slice(50, 51)),
    "exchanged": exchanged,
    "list": lambda rows: list(zip(*rows, strict=True)),
    "reversed list": lambda rows: list(zip(*rows, strict=True))[::-1],
    "read": Read,
    "read from another row on": lambda rows: Read(rows, 1),
}


def charged(book: str, **options: Any) -> dict[str, Any]:
    """A run whose book lies on process 0's disk alone."""
    here = torch.distributed.get_rank() == 0
    return train(budget=book if here else "/nowhere/book", reproducible=None, **options)


def charged_loop(book: str) -> dict[str, Any]:
    """A loop, with the book in the environment of all processes."""
    os.environ["VESTIGE_BUDGET"] = book
    try:
        return loop(reproducible=None, epochs=1)
    finally:
        del os.environ["VESTIGE_BUDGET"]


def squared(outputs: Any, targets: Any) -> Any:
    return nn.functional.mse_loss(outputs, nn.functional.one_hot(targets, outputs.shape[-1]).float())


def loop(
    kind: str = "plain",
    seed: int = 1,
    physical: int | None = 4,
    epochs: int = 1,
    arrange: str | None = None,
    **given: Any,
) -> Any:
    """A user's own loop."""
    model, options = network(seed), {"reproducible": 5, **given}
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if kind == "sharded":
        model = sharded(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.pop("lr", 0.05))
    sampler = options.pop("sampler", None)
    order = {"shuffle": True} if sampler is None else {"sampler": sampler()}
    rows = data() if arrange is None else ARRANGED[arrange](data())
    dataset = TensorDataset(*rows) if isinstance(rows, tuple) else rows
    loader = DataLoader(dataset, batch_size=12, **order)
    epsilon = options.pop("epsilon", None)
    steps = options.pop("steps", 10**6)
    asked = {name: options.pop(name) for name in ("users", "sample", "cap", "rows_per_user") if name in options}
    engine = vestige.PrivacyEngine(**options)
    more = asked | {"max_grad_norm": 1.0, "method": "fo-dp-sgd", "max_physical_batch_size": physical}
    if epsilon is None:
        made = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, **more)
    else:
        made = engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader, target_epsilon=epsilon, target_delta=1e-3, epochs=1,
            **more,
        )  # fmt: skip
    model, optimizer, loader = made
    if kind == "ddp later":
        model = nn.parallel.DistributedDataParallel(model)
    path, stopped = [], None
    try:
        for _ in range(epochs):
            for x, y in loader:
                before = engine._steps.step_number
                LOSS(model(x), y).backward()
                optimizer.step()
                if engine._steps.step_number > before:
                    path.append(flat(model))
                if len(path) >= steps:
                    return None
    except vestige.BudgetSpent:
        stopped = len(path)
    return {
        "path": torch.stack(path),
        "head": sorted((repr(question), count) for question, count in engine._ledger.spent.items()),
        "stopped": stopped,
        "may_step": engine.may_step,
    }


def distributed_sampler() -> Any:
    from torch.utils.data.distributed import DistributedSampler

    return DistributedSampler(TensorDataset(*data()))


def tensor_parallel() -> Any:
    """Rows of the one layer by one process, columns of the other by another."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return vestige.train(model, LOSS, data(), noise_multiplier=1.0, delta=1e-3, sample_rate=0.25, steps=2)


def two_dimensions() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (1, torch.distributed.get_world_size()), mesh_dim_names=("a", "b")))
    return vestige.train(model, LOSS, data(), noise_multiplier=1.0, delta=1e-3, sample_rate=0.25, steps=2)


def ask_apart() -> None:
    """Every process asks about another step."""
    from vestige.priced_questions import SampledGaussian
    from vestige.processes.distributed_setup import processes
    from vestige.processes.ledger import SharedLedger

    group = processes()
    ledger = SharedLedger(group, None)
    ledger.open({})
    ledger.ask(SampledGaussian(0.1, 1.0), step=0, part=0, sensitivity=1.0)
    ledger.ask(SampledGaussian(0.1, 1.0), step=1 + group.rank, part=0, sensitivity=1.0)


def shares(examples: int, rate: float) -> Any:
    """The examples of a few samples that are this process's."""
    from vestige.processes.distributed_setup import processes
    from vestige.randomness.keys import Randomness
    from vestige.randomness.sampling import Poisson

    key = Randomness.shared(processes().secret())
    drawn = [Poisson(rate).draw(examples, index, key) for index in range(20)]
    return [each.tolist() for each in drawn], [processes().own(each).tolist() for each in drawn]


by_layers = partial(vestige.make_method, "dp-sgd", groups="layers")
balanced = partial(vestige.make_method, "dp-sgd", balance="relative")


def assumption(name: str, arrange: str | None = None) -> str:
    """What a run in several processes says about an assumption."""
    rows = data(60, 0) if arrange is None else ARRANGED[arrange](data(60, 0))
    given = {"noise_multiplier": 1.0, "delta": 1e-3, "sample_rate": 0.25, "steps": 2}
    return vestige.train(network(1), LOSS, rows, method="dp-sgd", **given).guarantee().assumption(name).status
