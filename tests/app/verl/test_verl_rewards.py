"""Rewards of runs that verl trains; all else of them is in `tests/integrations/verl_training`."""

import pytest

from whet.app.verl.train import explain_unread
from whet.types import JUDGE, Reward, Target

pytestmark = pytest.mark.anyio


async def test_verl_reads_the_reward_of_the_attempt_alone() -> None:
    for read in (Reward(value=1.0), Reward(value=1.0, key=f"{JUDGE}.score")):
        assert await explain_unread(read) == ""
    for unread in (Reward(value=1.0, key="length"), Reward(value=1.0, target=Target(turn=0))):
        assert "add it to what the agent returns" in await explain_unread(unread)
