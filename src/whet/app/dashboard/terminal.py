"""A run in the terminal: its curve, queue, alarms and last failures, live."""

from typing import Any

import anyio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from whet.app.cli.display import draw_curve
from whet.app.dashboard.pages import overview
from whet.app.dashboard.run_catalog import OpenedRun
from whet.io.text import escape_control_characters

REFRESH_S = 1.0
FAILURES = 5
METRICS = (
    ("reward", "reward"),
    ("reward_std", "spread"),
    ("logprob_gap", "log-prob gap"),
    ("entropy", "entropy"),
    ("staleness", "staleness"),
    ("sampled_tokens", "tokens"),
    ("step_seconds", "seconds"),
)

Frame = dict[str, Any]  # Any: the answers of the dashboard's API


async def read_frame(run: OpenedRun) -> Frame:
    """Return what one picture of the terminal shows."""
    return {
        "run": await overview.read_run(run),
        "steps": await overview.read_steps(run, -1),
        "queue": await overview.read_queue(run),
    }


async def watch_run(run: OpenedRun, console: Console) -> None:
    """Draw the run until Ctrl-C."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            frame = await read_frame(run)
            live.update(draw_frame(frame, console.width), refresh=True)
            await anyio.sleep(REFRESH_S)


def draw_frame(frame: Frame, width: int) -> RenderableType:
    """Draw a picture of a run."""
    run, steps, queue = frame["run"], frame["steps"], frame["queue"]
    head = Text(escape_control_characters(run["name"]), "bold")
    head.append(f"  {run['state'] or 'no folder here'}  {run['model']}  ", "not bold")
    head.append(f"{run['steps']} steps", "not bold")
    rewards: list[float | None] = steps["metrics"].get("reward", [])
    parts: list[RenderableType] = [head, Text()]
    parts += [Text(line, "cyan") for line in draw_curve(rewards, width) or ["no steps yet"]]
    parts += [_format_latest(steps["metrics"]), Text(), _format_queue(queue)]
    parts += [
        Text(f"! {each['message']} ({each['metric']} {each['value']:.3g}, step {each['step']})")
        for each in run["alarms"]
    ]
    if queue["failures"]:
        table = Table(title="failures", title_justify="left", expand=False)
        for title in ("kind", "count", "last", "message"):
            table.add_column(title, justify="right" if title == "count" else "left")
        for each in queue["failures"][:FAILURES]:
            cells = (
                each["kind"],
                str(each["count"]),
                each["last"],
                escape_control_characters(each["message"])[:120],
            )
            table.add_row(*(Text(cell) for cell in cells))
        parts += [Text(), table]
    return Group(*parts)


def _format_latest(metrics: dict[str, list[float | None]]) -> Text:
    shown = [
        f"{title} {values[-1]:.4g}"
        for name, title in METRICS
        if (values := metrics.get(name)) and values[-1] is not None
    ]
    return Text("   ".join(shown))


def _format_queue(queue: Frame) -> Text:
    counts = dict.fromkeys(("queued", "running", "succeeded", "failed"), 0)
    for statuses in queue["statuses"].values():
        for status, count in statuses.items():
            counts[status] += count
    alive = sum(worker["due"] >= queue["now"] for worker in queue["workers"])
    shown = "   ".join(f"{status} {count}" for status, count in counts.items())
    return Text(f"rollouts: {shown}   workers alive: {alive} of {len(queue['workers'])}")
