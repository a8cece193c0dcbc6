"""What should be run for a budget of privacy and time? `vestige plan` chooses, before any data is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from vestige.cli.dataclass_flags import with_flags
from vestige.cli.errors import refuse_if_given
from vestige.cli.terminal import Json, print_json, stderr, stdout

if TYPE_CHECKING:
    from vestige.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """The flags of `vestige plan`."""

    examples: Annotated[int, typer.Option(help="How many examples there are: a public number.")]
    epsilon: Annotated[float, typer.Option(help="Privacy budget.")]
    time: Annotated[str, typer.Option(help="How long training may take: 90s, 30m, 1h.")]
    delta: Annotated[float, typer.Option(help="Allowed failure probability, below 1/N.")] = 1e-5
    kind: Annotated[str, typer.Option(help="Of data: images, features, text or tabular.")] = "images"
    recipe: Annotated[str | None, typer.Option(help="Plan this recipe (default: the usual one of the kind).")] = None
    model: Annotated[
        str | None, typer.Option(help="Time this network here, on made-up examples (default: the recipe's).")
    ] = None
    shape: Annotated[str, typer.Option(help="Shape of an example: 3,32,32 for images.")] = "3,32,32"
    views_per_second: Annotated[
        float | None, typer.Option(help="Throughput, if it is known: nothing is timed then.")
    ] = None
    users: Annotated[
        int | None,
        typer.Option(
            help="How many users the rows belong to: also compare what hides all rows of one.", rich_help_panel="Users"
        ),
    ] = None
    rows_per_user: Annotated[int | None, typer.Option(help="The most rows that one has.", rich_help_panel="Users")] = (
        None
    )
    device: Annotated[str | None, typer.Option(help="Where to time it: cpu, cuda, ...")] = None
    out: Annotated[Path | None, typer.Option(help="Also write the plan as one page, FILE.html.")] = None
    as_json: Json = False


@with_flags(PlanFlags)
def plan(context: typer.Context, flags: PlanFlags) -> None:
    """Choose batch, steps, noise and learning rate for a budget of privacy and time, before any data is touched.

    Every batch and number of steps has its noise at this epsilon, and with it a signal: a whole run's gradients over a
    whole run's noise. The plan has nearly the largest signal that the time allows, near the recipe's own batch.

    Examples:

        vestige plan --examples 50000 --epsilon 3 --time 1h --model wrn16-4

        vestige plan --examples 20000 --epsilon 1 --time 10m --kind tabular --views-per-second 50000 --out plan.html

        vestige plan --examples 160000 --users 10000 --rows-per-user 16 --epsilon 4 --time 10m --kind tabular
        --views-per-second 50000
    """
    from vestige.compare.report import plans_page as report
    from vestige.recipes.catalogue import find
    from vestige.recipes.planner import USUAL, Budget, seconds_of
    from vestige.recipes.planner import plan as planned

    if (flags.users is None) != (flags.rows_per_user is None):
        raise ValueError("give --users and --rows-per-user, both of them: all that is hidden belongs to one of so many")
    seconds = seconds_of(flags.time)
    if flags.recipe is None and flags.kind not in USUAL:
        raise ValueError(f"kind={flags.kind!r} must be one of {', '.join(USUAL)}")
    if flags.recipe is not None:
        refuse_if_given(context, ("kind",), "a recipe is for one kind of data")
    wanted = find(flags.recipe or USUAL[flags.kind])
    speed = flags.views_per_second
    if speed is None:
        price: dict[str, Any] = {
            "examples": flags.examples,
            "epsilon": flags.epsilon,
            "delta": flags.delta,
            "seconds": seconds,
        }
        speed = _timed(
            wanted,
            flags.model,
            flags.shape,
            flags.device,
            lambda views: planned(Budget(**price, views_per_second=views), flags.recipe, flags.kind),
        )
    else:
        refuse_if_given(context, ("model", "device", "shape"), "the throughput is given, and nothing is timed")
    budget = Budget(
        examples=flags.examples, epsilon=flags.epsilon, delta=flags.delta, seconds=seconds, views_per_second=speed
    )
    found = planned(budget, flags.recipe, flags.kind).to_json()
    if flags.users is not None and flags.rows_per_user is not None:
        found["users"] = _for_users(found["choice"], flags.users, flags.rows_per_user, flags.epsilon, flags.delta)
    if flags.out is not None:
        from vestige.files import make_folder

        make_folder(flags.out.parent)
        flags.out.write_text(report.page(found), encoding="utf-8")
    if flags.as_json:
        print_json(found)
        return
    _print_plan(found)
    if flags.out is not None:
        stdout.print(f"wrote {flags.out}", markup=False)


def _print_plan(found: dict[str, Any]) -> None:
    from vestige.compare.report import plans_page as report

    for line in report.findings(found):
        stdout.print(line, markup=False)
    table = Table("batch", "steps", "noise multiplier", "signal", "takes")
    for each in found["by_batch"]:
        mark = " <" if each["batch"] == found["choice"]["batch"] else ""
        row = (
            f"{each['batch']:,}",
            f"{each['steps']:,}",
            f"{each['noise_multiplier']:.3g}",
            f"{each['signal']:,.0f}{mark}",
        )
        table.add_row(*row, report.duration(each["seconds"]))
    stdout.print(table)
    stdout.print(
        "the table's noise is by Renyi, a little above; that of the plan is by loss distributions", markup=False
    )
    stdout.print(found["command"], markup=False)
    if "users" in found:
        _print_users(found["users"], found["choice"])


def _for_users(
    choice: dict[str, Any], users: int, rows_per_user: int, epsilon: float, delta: float
) -> list[dict[str, object]]:
    from dataclasses import asdict

    from vestige.recipes.compare_user_level_mechanisms import mechanisms

    sizes = {"users": users, "rows_per_user": rows_per_user, "batch": choice["batch"], "steps": choice["steps"]}
    return [asdict(each) for each in mechanisms(**sizes, epsilon=epsilon, delta=delta)]


def _print_users(found: list[dict[str, Any]], choice: dict[str, object]) -> None:
    """What hides all rows of one user, at as many rows a step and as many steps."""
    stdout.print(
        f"to hide all rows of one user at the same epsilon, {choice['batch']:,} rows a step, {choice['steps']:,} steps "
        "(noise by Renyi; of a mean, in clips):",
        markup=False,
    )
    table = Table("sample", "rows per user", "cap", "rate", "noise multiplier", "noise of a mean")
    least = min(each["noise_of_mean"] for each in found)
    for each in found:
        mark = " <" if each["noise_of_mean"] == least else ""
        cap = "" if each["cap"] is None else str(each["cap"])
        noise = f"{each['noise_multiplier']:.3g}", f"{each['noise_of_mean']:.3g}{mark}"
        table.add_row(each["sample"], str(each["rows_per_user"]), cap, f"{each['sample_rate']:.3g}", *noise)
    stdout.print(table)
    stdout.print(
        "at one clip; the mean of a user's unlike rows is shorter, and its clip may shrink towards one over the root "
        "of their number",
        markup=False,
    )


OPTIMISTIC = 8.0
"""How much faster views may be in a batch than one example at a time."""


def _timed(
    recipe: Recipe, model: str | None, shape: str, device: str | None, planned: Callable[[float], object]
) -> float:
    """Views a second on this machine. Where one example shows that no plan fits the time, the rest is not timed."""
    from vestige.recipes.throughput import views_per_second
    from vestige.tf32 import check_device, default_device

    name = model or recipe.network
    if name in (None, "words"):
        raise ValueError(
            f"views_per_second=None: {recipe.name} has no network that could be timed; give its throughput"
        )
    try:
        sizes = tuple(int(part) for part in shape.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(f"shape={shape!r} must be positive whole numbers with commas between: 3,32,32")
    where = device or default_device()
    check_device(where)
    if not where.startswith("cuda"):
        one = views_per_second(name, sizes, augment=recipe.augment, device=where, batch=1, steps=1)
        try:
            planned(OPTIMISTIC * one)
        except ValueError as problem:
            raise ValueError(
                f"{problem}. One example was timed on {where}, and {OPTIMISTIC:g} times its pace is assumed: for "
                "another machine, time it there or give views_per_second"
            ) from None
    found = views_per_second(name, sizes, augment=recipe.augment, device=where)
    stderr.print(f"timed {name} on {where}: {found:,.0f} views a second, on made-up examples", markup=False)
    return found
