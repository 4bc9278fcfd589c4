"""A run of 100,000 rollouts: pages that answer at once, and a list that scrolls smoothly."""

import time
from collections.abc import Generator
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import httpx
import pytest
from playwright.sync_api import sync_playwright

from support.chromium import CHROMIUM, FLAGS
from support.runs.recorded_run import make_folder
from support.store.many_rollouts import NEEDLE, record_many
from whet.app.dashboard.run_catalog import FolderCatalog
from whet.app.dashboard.serving import Dashboard

COUNT = 100_000
ANSWER_S = 0.2
FRAME_MS = 100
"""Half of the frames must take less while the list is scrolled. An idle machine draws one every 17
ms; this is what a busy one without a GPU leaves of it."""
QUERIES = (
    "",
    "order=oldest",
    "order=best",
    "order=worst&mode=train",
    "min_reward=0.9",
    "max_reward=-1",
    "min_reward=0.99&mode=train&order=best",
    "status=failed",
    "step=1&order=best",
    "group=many-000500",
    f"text={NEEDLE}",
    f"text={NEEDLE}&order=worst",
    "agent=nobody",
    "forked=true",
    "task=train-000000-001&order=oldest",
)
SCROLL = """
() => new Promise((done) => {
  const deltas = [];
  let last = performance.now();
  const frame = (now) => {
    deltas.push(now - last);
    last = now;
    window.scrollBy(0, 400);
    if (deltas.length < 150) requestAnimationFrame(frame);
    else done(deltas.slice(5));
  };
  requestAnimationFrame(frame);
})
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Generator[Dashboard]:
    directory: Path = tmp_path_factory.mktemp("many")
    anyio.run(record_many, make_folder(directory), COUNT)
    served = Dashboard(FolderCatalog(directory))
    yield served
    served.close()


def test_every_page_of_the_list_is_answered_in_200_ms(client: httpx.Client) -> None:
    for query in QUERIES:
        seconds: list[float] = []
        for _ in range(5):
            began = time.perf_counter()
            reply = client.get(f"/api/runs/mine/rollouts?{query}")
            seconds.append(time.perf_counter() - began)
            assert reply.status_code == 200
        # The least of a few: another program may have had the processor meanwhile.
        assert min(seconds) < ANSWER_S, (query, seconds)


def test_a_search_finds_the_oldest_rollout_page_by_page(client: httpx.Client) -> None:
    found: list[str] = []
    searched = 0
    after: dict[str, str] = {}
    while True:
        reply = client.get("/api/runs/mine/rollouts", params={"text": NEEDLE, **after})
        page: Any = reply.json()
        found += [row["id"] for row in page["rollouts"]]
        searched += page["searched"]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert found == ["many-000000-000"]
    assert searched == COUNT + 9


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: `make test-browser` installs it")
def test_the_list_scrolls_smoothly_and_keeps_few_rows_in_the_document(
    dashboard: Dashboard,
) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 820})
        page.set_default_timeout(60_000)
        page.goto(dashboard.create_link("mine"))
        page.get_by_role("link", name="Rollouts").click()
        page.locator("tr.row").first.wait_for()
        before = page.locator("tr.row a").first.inner_text()
        page.evaluate(SCROLL)  # the first pages, and the code that is compiled meanwhile
        medians = [median(page.evaluate(SCROLL)) for _ in range(3)]
        assert page.locator("tr.row a").first.inner_text() != before
        assert page.locator("tr.row").count() < 150
        assert page.evaluate("window.scrollY") > 20_000
        assert min(medians) < FRAME_MS, medians
        browser.close()
