"""A run as one HTML file: the same pages, with the data of the run inside."""

import base64
import hashlib
from pathlib import Path

from whet.app.dashboard.app import STATIC
from whet.app.dashboard.pages import overview, rollout_list, scores
from whet.app.dashboard.pages.attempt_page import AttemptPages
from whet.app.dashboard.pages.doctor_page import read_doctor
from whet.app.dashboard.pages.payload import to_browser_json
from whet.app.dashboard.pages.rollout_list import RolloutQuery
from whet.app.dashboard.run_catalog import Catalog, OpenedRun
from whet.io.files import atomic_file
from whet.store.queries.rollout_pages import Order, read_page

LIST_LIMIT = 200
"""Rollouts in the list, of each selection."""
DETAIL_LIMIT = 12
"""Rollouts with conversation and tokens, of each selection."""
SELECTIONS: tuple[tuple[Order, str | None], ...] = (
    ("newest", None),
    ("newest", "failed"),
    ("best", None),
    ("worst", None),
)
"""Orders and statuses of the rollouts that are taken along."""


async def write_html(catalog: Catalog, name: str, file: Path) -> int:
    """Write a run to a file, which needs no server and no network; return its size in bytes.

    It has all steps, and the newest, failed, best and worst rollouts. Raises NotFound.
    """
    run = await catalog.open(name)
    page = build_page(await _collect(run))
    with atomic_file(file) as partial:
        partial.write_bytes(page)
    return len(page)


async def _collect(run: OpenedRun) -> dict[str, object]:
    """Return the answers of the API by their paths."""
    base = f"/api/runs/{run.name}"
    pages = AttemptPages()
    details = await overview.read_run(run)
    data: dict[str, object] = {
        "/api/runs": {"runs": [_format_card(details)], "now": details["now"]},
        base: details,
        f"{base}/steps": await overview.read_steps(run, -1),
        f"{base}/queue": await overview.read_queue(run),
        f"{base}/resources": await overview.read_resources(run),
        f"{base}/checkpoints": await overview.read_checkpoints(run),
        f"{base}/evaluations": await scores.read_evaluations(run),
        f"{base}/rewards": await scores.read_reward_health(run),
        f"{base}/doctor": await read_doctor(run, pages.vocabularies),
        f"{base}/groups": await rollout_list.read_groups(run, rollout_list.GroupQuery(limit=200)),
    }
    listed: dict[str, object] = {}
    detailed: list[str] = []
    for order, status in SELECTIONS:
        query = RolloutQuery.model_validate({"order": order, "status": status, "limit": LIST_LIMIT})
        page = await run.store.browse(
            read_page, query.build_filter(), order=order, limit=LIST_LIMIT
        )
        listed = {row.id: rollout_list.serialize_row(row) for row in page.rows} | listed
        detailed += [row.id for row in page.rows[:DETAIL_LIMIT]]
    data[f"{base}/rollouts"] = {"rollouts": list(listed.values()), "next": None, "total": None}
    for id in dict.fromkeys(detailed):
        rollout = await pages.read_rollout(run, id)
        data[f"{base}/rollouts/{id}"] = rollout
        for attempt in await run.store.attempts(id):
            path = f"{base}/attempts/{attempt.id}"
            data[path] = await pages.read_attempt(run, attempt.id)
            data[f"{path}/credit"] = await pages.read_credit(run, attempt.id)
    return data


def _format_card(details: dict[str, object]) -> dict[str, object]:
    names = ("name", "kind", "state", "model", "gain", "changed", "steps")
    shown = {name: details[name] for name in names}
    return {**shown, "rewards": (), "reward": None, "bytes": 0}


def build_page(data: dict[str, object]) -> bytes:
    """Return the HTML: the bundle inline, which its policy names by digests, and the data."""
    style = (STATIC / "app.css").read_text()
    script = (STATIC / "app.js").read_text().replace("</script", "<\\/script")
    # A `<` inside the data could end its element; as an escape it is the same JSON.
    embedded = to_browser_json(data).decode().replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src {_hash_source(script)}; style-src {_hash_source(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>whet</title><style>{style}</style></head>"
        '<body><div id="app"></div>'
        f'<script type="application/json" id="data">{embedded}</script>'
        f'<script type="module">{script}</script></body></html>\n'
    ).encode(errors="replace")


def _hash_source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
