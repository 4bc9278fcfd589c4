"""The game as a CrewAI flow: a player, an answerer and a search tool.

Nothing here knows that the player is trained: it is any model behind an OpenAI-compatible URL.
"""

import asyncio
import os
from collections.abc import Sequence

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("OTEL_SDK_DISABLED", "true")

from crewai import LLM
from crewai.flow.flow import Flow, listen, router, start
from crewai.tools import BaseTool
from game import Fact, Game, Helper, LocalHelper, Thing
from pydantic import BaseModel, PrivateAttr

MAX_TOKENS = 16


class EndpointHelper:
    """Answers and searches with a model."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    async def answer(self, question: str, secret: str) -> str:
        reply = await self.llm.acall(
            f"In a game of 20 Questions the secret is {secret!r}. Answer with yes, no or unclear, "
            f"and nothing else: {question}"
        )
        return _plain(reply)

    async def search(self, facts: Sequence[Fact]) -> list[str]:
        known = "; ".join(f"{fact.question} {fact.answer}" for fact in facts)
        reply = await self.llm.acall(
            "Name at most nine everyday things that fit, each one word, separated by commas, and "
            f"nothing else: {known or 'anything'}"
        )
        return [noun.strip() for noun in _plain(reply).split(",") if noun.strip()]


def _plain(reply: object) -> str:
    return str(reply).strip().lower().rstrip(".")


class SearchTool(BaseTool):
    """Searches for things that fit the facts."""

    name: str = "search"
    description: str = "Lists things that fit a list of questions with their answers."
    _helper: Helper = PrivateAttr()

    def __init__(self, helper: Helper) -> None:
        super().__init__()
        self._helper = helper

    def _run(self, facts: list[Fact]) -> list[str]:
        return asyncio.run(self._arun(facts))

    async def _arun(self, facts: list[Fact]) -> list[str]:
        return await self._helper.search(facts)


class Table(BaseModel):
    """The state of the flow. CrewAI copies it at every step, so only the game is in it."""

    game: Game


class TwentyQuestions(Flow[Table]):
    """One turn after the other until the game is over."""

    _player: LLM = PrivateAttr()
    _helper: Helper = PrivateAttr()
    _search: SearchTool = PrivateAttr()

    @start("next")
    async def ask(self) -> str:
        return str(await self._player.acall(list(self.state.game.messages)))

    @router(ask)
    async def hear(self, line: str) -> str:
        await self.state.game.turn(line, self._helper.answer, self._search.arun)
        return "over" if self.state.game.over else "next"

    @listen("over")
    def end(self) -> Game:
        return self.state.game


def player_at(base_url: str, api_key: str, model: str, temperature: float | None = None) -> LLM:
    """Build the player's model."""
    return LLM(
        model=model,
        provider="openai",
        base_url=base_url,
        api_key=api_key,
        temperature=temperature,
        max_tokens=MAX_TOKENS,
    )


def helper_for(things: Sequence[Thing]) -> Helper:
    """Build the helper: a model if HELPER_BASE_URL is set, else the word list."""
    if url := os.environ.get("HELPER_BASE_URL"):
        key = os.environ.get("HELPER_API_KEY", "none")
        model = os.environ.get("HELPER_MODEL", "gpt-5-mini")
        return EndpointHelper(LLM(model=model, provider="openai", base_url=url, api_key=key))
    return LocalHelper(things)


async def play(secret: str, turns: int, player: LLM, helper: Helper) -> Game:
    """One game, to its end."""
    flow = TwentyQuestions(initial_state=Table(game=Game(secret, turns)), suppress_flow_events=True)
    flow._player, flow._helper, flow._search = player, helper, SearchTool(helper)
    return await flow.kickoff_async()
