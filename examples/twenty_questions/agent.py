"""The game as an agent, which a runner runs in the environment with CrewAI."""

from flow import helper_for, play, player_at
from game import among, load_things, turn_rewards

import whet


async def guess(task, llm):
    """Play one game: 1.0 if it was won, and a small reward for each turn that helped."""
    things = among(load_things(task["split"]), task["secret"])
    player = player_at(llm.base_url, llm.api_key, llm.model)
    game = await play(task["secret"], task["turns"], player, helper_for(things))
    for turn, value in enumerate(turn_rewards(game, things)):
        whet.emit_reward(value, turn=turn)
    return float(game.won)
