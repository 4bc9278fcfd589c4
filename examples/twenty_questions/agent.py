"""The game as an agent of `whet`: what a runner runs, in the environment that has CrewAI."""

from flow import helper_for, play, player_at
from game import load_things, score

import whet


async def guess(task, llm):
    """Play one game; 1.0 if it was won, else a little for what was ruled out."""
    things = load_things(task["split"])
    player = player_at(llm.base_url, llm.api_key, llm.model)
    game = await play(task["secret"], task["turns"], player, helper_for(things))
    whet.emit_reward(float(game.won), key="won")
    return score(game, things)
