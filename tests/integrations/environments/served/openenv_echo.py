"""A server of OpenEnv whose reward is the share of letters in two messages."""

# pyright: basic, reportMissingImports=false, reportIncompatibleMethodOverride=false
import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Text(Action):
    message: str


class Prompt(Observation):
    prompt: str = ""


class Letters(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **options):
        self._state = State(step_count=0)
        return Prompt(prompt=f"Say a word for {seed}.", done=False, reward=0.0)

    def step(self, action, **options):
        self._state.step_count += 1
        share = sum(c.isalpha() for c in action.message) / max(len(action.message), 1)
        done = self._state.step_count == 2
        return Prompt(prompt="Say another.", done=done, reward=share / 2)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_app(Letters, Text, Prompt, env_name="letters", max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
