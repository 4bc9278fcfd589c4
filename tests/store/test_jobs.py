"""Work on its way to a thread of the store."""

import asyncio
import threading

import pytest

from whet.errors import StoreClosed
from whet.store.jobs import Inbox, deliver

pytestmark = pytest.mark.anyio


async def test_what_is_asked_in_one_turn_of_the_loop_is_taken_together() -> None:
    inbox = Inbox[int](lambda jobs: False)
    taken: list[list[int]] = []

    def work() -> None:
        more = True
        while more:
            jobs, more = inbox.take()
            taken.append([job.work for job in jobs])
            deliver((job, job.work) for job in jobs)

    thread = threading.Thread(target=work)
    thread.start()
    assert await asyncio.gather(*(inbox.ask(number) for number in range(5))) == [*range(5)]
    assert await inbox.ask(5) == 5
    inbox.close()
    thread.join(10)
    assert taken == [[0, 1, 2, 3, 4], [5], []]


async def test_closing_hands_over_what_was_asked_and_takes_no_more() -> None:
    inbox = Inbox[str](lambda jobs: False)
    asked = inbox.ask("in time")
    inbox.close()
    with pytest.raises(StoreClosed):
        inbox.ask("too late")
    jobs, more = inbox.take()
    assert ([job.work for job in jobs], more) == (["in time"], False)
    deliver((job, "done") for job in jobs)
    assert await asked == "done"
    inbox.close()
