"""What do tests of loops with sharded modules share? A user's own loop, in one process or in a gang's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import vestige
from process_gang import LOSS, data, flat, network, sharded, whole

BOUND = 0.5


class Marked(nn.Module):
    """With things that a loop changes, a scale that it sets and a counter that the passes set; a buffer, a frozen layer,
    and activations that are computed again on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.inner[2].requires_grad_(False)
        self.scale, self.calls = 1.0, 0
        self.register_buffer("shift", torch.full((3,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.scale * checkpoint(self.inner, x, use_reentrant=False) + self.shift


def private(
    method: Any = "dp-sgd",
    kind: str = "plain",
    *,
    optimizer: str = "AdamW",
    physical: int | None = None,
    batch: int = 12,
    examples: int = 60,
    model: Any = network,
    sampling: str = "poisson",
    noise_multiplier: float = 1.0,
    steps_per_batch: int = 1,
    **engine: Any,
) -> tuple[vestige.PrivacyEngine, nn.Module, torch.optim.Optimizer, Any]:
    module = model()
    if kind == "sharded":
        if isinstance(module, Marked):
            from torch.distributed.fsdp import fully_shard

            fully_shard(module.inner[0])
            fully_shard(module)
        else:
            module = sharded(module)
    moves = vestige.optim.rules.AdamBC if optimizer == "AdamBC" else getattr(torch.optim, optimizer)
    made = moves(module.parameters(), lr=0.05, **({"momentum": 0.9} if optimizer == "SGD" else {}))
    held = vestige.PrivacyEngine(**{"reproducible": 5, **engine})
    chosen = method() if callable(method) else method
    module, made, loader = held.make_private(
        module=module, optimizer=made, data_loader=DataLoader(TensorDataset(*data(examples)), batch_size=batch),
        noise_multiplier=noise_multiplier, max_grad_norm=BOUND, method=chosen, max_physical_batch_size=physical,
        steps_per_batch=steps_per_batch, sampling=sampling,
    )  # fmt: skip
    return held, module, made, loader


def steps(
    engine: vestige.PrivacyEngine, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, epochs: int = 2,
    steps_per_batch: int = 1, closure: bool = False,
) -> Iterator[int]:  # fmt: skip
    """The loop of a user; yields after every step."""
    for _ in range(epochs):
        for x, y in loader:
            for _ in range(steps_per_batch):
                before = engine._steps.step_number

                def again(x: Any = x, y: Any = y) -> Any:
                    optimizer.zero_grad()
                    loss = LOSS(model(x), y)
                    loss.backward()
                    return loss

                if closure:
                    optimizer.step(again)
                else:
                    again()
                    optimizer.step()
                if engine._steps.step_number > before:
                    yield before


def loop(
    method: Any = "dp-sgd",
    kind: str = "plain",
    *,
    spoil: bool = False,
    evaluate: bool = False,
    epochs: int = 1,
    closure: bool = False,
    **given: Any,
) -> dict[str, Any]:
    """The parameters after every step, and what is kept of them."""
    made = engine, model, optimizer, _ = private(method, kind, **given)
    if spoil:
        _clip_by_process(engine)
    path, seen, public = [flat(model)], [], data(9, 4)[0]
    more = given.get("steps_per_batch", 1)
    for number in steps(*made, epochs=epochs, steps_per_batch=more, closure=closure):
        if evaluate:
            if isinstance(model, Marked):
                model.scale = 1.0 + 0.5 * number
            model.eval()
            with torch.no_grad():
                seen.append(model(public))
            model.train()
        path.append(flat(model))
    kept = {name: tuple(v.shape) for name, v in engine._steps.learner().memory.items() if torch.is_tensor(v)}
    moments = [
        (tuple(here.shape), here.numel(), p.numel())
        for p, state in optimizer.state.items()
        for here in [state["exp_avg"].to_local() if hasattr(state["exp_avg"], "to_local") else state["exp_avg"]]
    ] if "Adam" in type(optimizer).__name__ else []  # fmt: skip
    between = _stored(engine)
    model(public)
    return {
        "path": torch.stack(path),
        "seen": torch.stack(seen) if seen else torch.zeros(0),
        "head": sorted((repr(question), count) for question, count in engine._ledger.spent.items()),
        "asked": engine._ledger.spent.total(),
        "memory": kept,
        "gradient": len(engine._steps.learner().mover.gradient),
        "moments": moments,
        "stored": (between, _stored(engine)),
        "grads": sum(p.grad is not None for p in model.parameters()),
        "calls": getattr(model, "calls", None),
        "rate": engine.automatic_rate(10)[0] if engine._steps.method.rule.gain else None,
    }


def _stored(engine: Any) -> int:
    """Bytes of the parameters in which passes run."""
    return sum(p.untyped_storage().nbytes() for p in engine._steps.passes.module.parameters())


def compiled(how: str) -> Any:
    """The parameters after an epoch, and what was evaluated, of a module that is compiled before or after."""
    if how == "before":
        module = network()
        module[0].compile(backend="eager")
        return _made(sharded(module), torch.optim.SGD(module.parameters(), lr=0.1))
    _, model, optimizer, loader = private(kind="sharded")
    called, public = torch.compile(model, backend="eager") if how == "after" else model, data(9, 4)[0]
    for x, y in loader:
        optimizer.zero_grad()
        LOSS(called(x), y).backward()
        optimizer.step()
    called.eval()
    with torch.no_grad():
        return torch.cat([flat(model), called(public).ravel()])


def noise_of_a_step() -> torch.Tensor:
    """What one step with a secret key moves weights whose gradients are all zero, in units of the noise."""
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(nn.Linear(3000, 2, bias=False))
    before = flat(module)
    moves = torch.optim.SGD(module.parameters(), lr=1.0)
    rows = TensorDataset(torch.zeros(40, 3000), torch.zeros(40, dtype=torch.int64))
    _, moves, loader = vestige.PrivacyEngine().make_private(
        module=module, optimizer=moves, data_loader=DataLoader(rows, batch_size=10), noise_multiplier=1.5,
        max_grad_norm=2.0,
    )  # fmt: skip
    x, y = next(iter(loader))
    LOSS(module(x), y).backward()
    moves.step()
    return (flat(module) - before) * 10 / 3.0


def _clip_by_process(engine: Any) -> None:
    """WRONG, for a test: the sum of a process's examples is clipped, and not each example."""
    from vestige.engines.bookkeeping import add_weighted
    from vestige.engines.per_example.gradient_forms import combine
    from vestige.mechanism.clipping import Flat

    passes = engine._steps.passes

    def wrong(total: Any) -> Iterator[Any]:
        for each in passes._pending:
            if not each.part.size:
                continue
            into = torch.zeros(passes.layout.size)
            gradients = {name: combine(parts) for name, parts in each.uses.items()}
            add_weighted(gradients, Flat(1e6), passes.layout, into, each.examples)
            into *= (BOUND / into.norm()).clamp(max=1.0)

            def put(into: Any = into) -> None:
                for segment in passes.layout.segments:
                    with total.at(segment) as where:
                        where += into[segment.start : segment.stop].view(segment.shape)

            yield put

    passes._shares = wrong


def saved_and_loaded(
    kind: str, folder: Path, *, before: int = 3, load: bool = False, into: str | None = None, by: str = "checkpoint"
) -> dict[str, Any]:
    """Some steps and a checkpoint; or a checkpoint, and some steps with it."""
    how = into or kind
    made = engine, model, optimizer, _ = private(
        "fo-dp-sgd", how, physical=4, ledger=folder / "ledger.jsonl", resume=load
    )
    try:
        if by == "state_dict":
            return {"state": engine.state_dict()}
        if load:
            engine.load_checkpoint(path=folder / "saved.pt", module=model, optimizer=optimizer)
        start = flat(model)
        went = steps(*made, epochs=9)
        for _ in zip(range(before), went, strict=False):
            pass
        if not load:
            engine.save_checkpoint(path=folder / "saved.pt", module=model, optimizer=optimizer)
            engine.save_checkpoint(path=folder / "saved.pt", module=model, optimizer=optimizer)
        held = engine._steps
        return {"start": start, "end": flat(model), "step": held.step_number, "asked": engine._ledger.spent.total()}
    finally:
        engine._ledger.close()


# --- what is refused --------------------------------------------------------------------------------------------------


def misused(how: str) -> Any:
    if how == "standardised inputs":
        _, model, _, loader = private()
        x, y = next(iter(loader))
        LOSS(model((x - x.mean(0)) / x.std(0)), y).backward()
    if how == "sharded later":
        engine, model, optimizer, loader = private()
        sharded(model)
        next(steps(engine, model, optimizer, loader))
    engine, model, optimizer, loader = private(kind="sharded")
    x, y = next(iter(loader))
    if how == "a part by itself":
        model[0](x).square().mean().backward()
        LOSS(model(x), y).backward()
        optimizer.step()
    if how == "eval mode":
        LOSS(model.eval()(x), y).backward()
        optimizer.step()
    if how == "a hook":
        model[1].register_forward_hook(lambda *_: None)
        model(x)
    if how == "another module":
        model[1] = nn.ReLU()
        model(x)
    if how == "a forward of its own":
        model[1].forward = torch.relu  # type: ignore[method-assign]
        model(x)
    if how == "written to":
        model(x)
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        model(x)
    if how == "another draw":
        if torch.distributed.get_rank() == 1:
            x, y = next(iter(loader))
        LOSS(model(x), y).backward()
        optimizer.step()
    if how == "another step":
        if torch.distributed.get_rank() == 1:
            engine._loop._steps = 1
        model(x)
    if how in ("another rate", "frozen in one process", "another decay"):
        for number, (x, y) in enumerate(loader):
            if torch.distributed.get_rank() == 1 and number == 1:
                if how == "another rate":
                    optimizer.param_groups[0]["lr"] = 0.01
                elif how == "another decay":
                    optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.5)
                else:
                    next(model.parameters()).requires_grad_(False)
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            before = flat(model)
            try:
                optimizer.step()
            except ValueError:
                assert (number, engine._ledger.spent.total()) == (1, 1), "it was asked before it was refused"
                assert torch.equal(flat(model), before), "it has moved"
                raise
    if how == "evaluated before":
        from torch.distributed.fsdp import fully_shard

        module = fully_shard(network())
        moves = torch.optim.SGD(module.parameters(), lr=0.1)
        with torch.no_grad():
            module(x)
        assert not any(hasattr(p, "placements") for p in module.parameters())
        return _made(module, moves)
    if how in ("evaluated before the optimizer", "and resharded"):
        from torch.distributed.fsdp import fully_shard

        module = network()
        fully_shard(module[0])
        fully_shard(module)
        with torch.no_grad():
            module(x)
        if how == "and resharded":
            module.reshard()
        return _made(module, torch.optim.SGD(module.parameters(), lr=0.1))
    if how == "on the meta device":
        with torch.device("meta"):
            module = network()
        sharded(module)
        return _made(module, torch.optim.SGD(module.parameters(), lr=0.1))
    return None


def _made(module: Any, moves: Any) -> Any:
    engine = vestige.PrivacyEngine(reproducible=5)
    engine.make_private(
        module=module, optimizer=moves, data_loader=DataLoader(TensorDataset(*data()), batch_size=12),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    return engine._loop is not None


def evaluated_between_steps() -> float:
    """How far the outputs of a sharded model in `vestige.train` are from those of its parameters."""
    model, public = sharded(network()), data(9, 4)[0]
    rows, farthest = dict(model.named_parameters()), 0.0
    for _ in vestige.train(model, LOSS, data(), noise_multiplier=1.0, delta=1e-3, sample_rate=0.25, steps=4, lr=0.5):
        weights = {name: whole(p) for name, p in rows.items()}
        with torch.no_grad():
            wanted = torch.func.functional_call(network(), weights, (public,))
            farthest = max(farthest, float((model(public) - wanted).abs().max()))
    return farthest
