"""Report of `whet doctor`: exactness of a run's rows, and what its chat template allows."""

from anyio import to_thread
from pydantic import JsonValue

from whet.app.dashboard.pages.token_texts import Vocabularies
from whet.app.dashboard.run_catalog import OpenedRun, read_config
from whet.app.inspection.exactness import ExactnessCounts, count_exactness
from whet.app.inspection.template_report import build_template_report, describe_template
from whet.errors import ConfigError
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.store.queries.rollout_pages import RolloutFilter, read_page

NEWEST = 200
"""Rollouts that the page counts; `whet doctor --run` counts all."""


async def read_doctor(run: OpenedRun, vocabularies: Vocabularies) -> dict[str, object]:
    """Return the exactness of the newest rollouts, and the report on the model's template."""
    config = read_config(run)
    where = RolloutFilter(mode="train", status="succeeded")
    page = await run.store.browse(read_page, where, limit=NEWEST)
    counts = ExactnessCounts()
    ids = [row.id for row in page.rows if not row.pruned]
    await count_exactness(counts, run.store, ids, config.selection)
    template = await to_thread.run_sync(vocabularies.find, config.model)
    return {
        "counts": counts.as_json(await run.store.steps()),
        "is_all": page.next is None,
        "model": config.model,
        "template": await to_thread.run_sync(_describe, template) if template else None,
    }


def _describe(template: ChatTemplate) -> JsonValue:
    try:
        return describe_template(build_template_report(Renderer(template)))
    except ConfigError as error:
        return str(error)
