"""How are weights without private data made from the terminal? `vestige prior make`, and `vestige prior show`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vestige.cli.errors import refuse_others
from vestige.cli.models.flags import DeviceFlag
from vestige.cli.terminal import LARGEST_SEED, Json, print_json, stdout, step_progress

if TYPE_CHECKING:
    from vestige.tasks.features.starting_weights import Prior


def prior(
    context: typer.Context,
    action: Annotated[str, typer.Argument(help="make, or show FILE.")],
    file: Annotated[Path | None, typer.Argument(help="The file to show.")] = None,
    generator: Annotated[
        str, typer.Option(help="What draws the images: dead-leaves, random-network, fractals, or mixed.")
    ] = "dead-leaves",
    model: Annotated[str, typer.Option(help="The network: wrn16-4, wrn40-4, resnet18, cnn.")] = "wrn16-4",
    size: Annotated[int, typer.Option(help="Height and width of an image, in pixels.")] = 32,
    channels: Annotated[int, typer.Option(help="3 for colour, 1 for grey.")] = 3,
    images: Annotated[int, typer.Option(help="How many different images are drawn.")] = 100_000,
    steps: Annotated[int, typer.Option(help="Steps of the contrastive training.")] = 2000,
    batch: Annotated[int, typer.Option(help="Images of a step; each is seen in two views.")] = 512,
    lr: Annotated[float, typer.Option(help="Largest learning rate.")] = 0.3,
    seconds: Annotated[float | None, typer.Option(help="Stop after so long, whatever --steps says.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes the images and the weights.", min=0, max=LARGEST_SEED)] = 0,
    device: DeviceFlag = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("prior.pt"),
    as_json: Json = False,
) -> None:
    """Make weights from procedural images alone, for a private run to start from; or say what a file of them is.

    A network learns by contrast on images that a procedure draws from random numbers. The file holds its weights and a
    statement of what they were made of; `vestige train --prior FILE` starts from them, at no price.

    Examples:

        vestige prior make --generator dead-leaves --model wrn16-4 --out prior.pt

        vestige prior show prior.pt
    """
    from vestige.tasks.features import starting_weights

    if action == "show":
        refuse_others(context, ("action", "file", "as_json"), "show takes a file alone")
        if file is None:
            raise ValueError("file=None: give the file to show")
        found = starting_weights.read(file)
        _show(file, found, as_json)
        return
    if action != "make":
        raise ValueError(f"action={action!r} must be make or show")
    if file is not None:
        raise ValueError(f"file={str(file)!r}: make writes to --out")
    if out.exists():
        raise ValueError(f"out={str(out)!r} exists: name another file")
    from vestige.priors.contrastive import Plan, make
    from vestige.tf32 import check_device, default_device

    plan = Plan(
        generator=generator, network=model, size=size, images=images, steps=steps, batch=batch, lr=lr, seed=seed
    )
    if channels not in (1, 3):
        raise ValueError(f"channels={channels} must be 1 or 3")
    where = device or default_device()
    check_device(where)
    with step_progress(not as_json) as bar:
        show = bar(f"prior of {generator}", steps)

        def watch(step: int, loss: float) -> bool:
            show(step, f"loss {loss:.3f}", None, None)
            return True

        made = make(plan, where, seconds=seconds, watch=watch, channels=channels)
    made.save(out)
    _show(out, made, as_json)


def _show(path: Path, prior: Prior, as_json: bool) -> None:
    facts = {"file": str(path), "network": prior.network, "channels": prior.channels, "sha256": prior.content}
    if as_json:
        print_json({**facts, "statement": dict(prior.statement)})
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in {**facts, **prior.statement}.items():
        table.add_row(key.replace("_", " "), str(value))
    stdout.print(table)
