"""The game as an agent of `whet`: what a runner runs, in the environment that has CrewAI."""

from flow import helper_for, play, player_at
from game import among, earned, load_things

import whet


async def guess(task, llm):
    """Play one game: 1.0 if it was won, and a little for each turn that helped."""
    things = among(load_things(task["split"]), task["secret"])
    player = player_at(llm.base_url, llm.api_key, llm.model)
    game = await play(task["secret"], task["turns"], player, helper_for(things))
    for turn, value in enumerate(earned(game, things)):
        whet.emit_reward(value, turn=turn)
    return float(game.won)
