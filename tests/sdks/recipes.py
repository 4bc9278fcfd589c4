"""Which SDKs the suite runs, and what is known of each beforehand."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples" / "agents"
CHANGED = re.compile(r" *# whet: begin\n(.*?) *# whet: end\n", re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """One row of the table."""

    name: str
    """As its users write it."""
    pins: str
    """The list of packages in `pins/`: its environment."""
    example: str
    """Its file in `examples/agents/`."""
    package: str
    """Whose version is told."""
    note: str = ""
    """What its users have to know."""
    function: str = "solve"
    dialect: str = "chat"
    streams: Literal["always", "both", "never"] = "both"
    forks: tuple[str, ...] = ()
    """Why turns do not continue the one before, where that is so; the usual one first."""
    environment: tuple[tuple[str, str], ...] = ()
    tracer: Literal["otel", "openai-agents"] | None = None
    """Which keeps the spans that it makes of its own work."""
    beside: str | None = None
    """Pins of a second environment whose commands it finds."""

    @property
    def version(self) -> str:
        """Of the package, as pinned."""
        pinned = (HERE / "pins" / f"{self.pins}.txt").read_text()
        [found] = re.findall(rf"^{self.package}==(.+)$", pinned, re.MULTILINE)
        return found

    @property
    def changed(self) -> str:
        """The lines of its example that a user changes."""
        program = (EXAMPLES / f"{self.example}.py").read_text()
        _, _, function = program.partition(f"def {self.function}(")
        found = CHANGED.search(function)
        assert found, f"{self.example}.py marks no lines in {self.function}"
        return textwrap.dedent(found[1])


RECIPES = [
    Recipe("openai", "openai", "openai_client", "openai"),
    Recipe(
        "anthropic",
        "anthropic",
        "anthropic_client",
        "anthropic",
        dialect="messages",
        note="The client adds `/v1` to a base URL that has it already; the gateway knows.",
    ),
    Recipe(
        "Strands Agents",
        "strands",
        "strands_agent",
        "strands-agents",
        streams="always",
        tracer="otel",
    ),
    Recipe(
        "strands-vllm",
        "strands-vllm",
        "strands_vllm_agent",
        "strands-vllm",
        streams="always",
        function="solve",
        note="`VLLMTokenRecorder` works as it does with vLLM: `recorder.history` has exactly the "
        "token ids that the store has, which a test compares. Training does not need it.",
    ),
    Recipe(
        "OpenAI Agents SDK",
        "openai-agents",
        "openai_agents",
        "openai-agents",
        dialect="responses",
        tracer="openai-agents",
        note="Call `set_tracing_disabled(True)` or set `OPENAI_AGENTS_DISABLE_TRACING=1`: else it "
        "uploads traces to OpenAI, with the key of a rollout if it has no other. With "
        "`runner.tracer` its traces are kept with the rollout instead.",
    ),
    Recipe(
        "OpenAI Agents SDK, Chat Completions",
        "openai-agents",
        "openai_agents",
        "openai-agents",
        function="solve_by_chat",
        tracer="openai-agents",
    ),
    Recipe(
        "Microsoft Agent Framework",
        "agent-framework",
        "agent_framework_agent",
        "agent-framework-core",
        dialect="responses",
        tracer="otel",
        beside="mcp-server-calculator",
        note="Its tool is `mcp-server-calculator`, over MCP and stdio. The second request of a "
        "conversation names the first by `previous_response_id` and sends nothing else of it; the "
        "gateway finds it in the store.",
    ),
    Recipe(
        "Microsoft Agent Framework, Chat Completions",
        "agent-framework",
        "agent_framework_agent",
        "agent-framework-core",
        function="solve_by_chat",
        tracer="otel",
        beside="mcp-server-calculator",
    ),
    Recipe(
        "CrewAI",
        "crewai",
        "crewai_agent",
        "crewai",
        environment=(("CREWAI_DISABLE_TELEMETRY", "true"),),
        note="`provider` must be said: without it a model name CrewAI does not know is refused. "
        "Set `CREWAI_DISABLE_TELEMETRY=true`: else it reports to its makers.",
    ),
    Recipe("LangGraph, LangChain", "langgraph", "langgraph_agent", "langgraph"),
    Recipe(
        "AutoGen",
        "autogen",
        "autogen_agent",
        "autogen-agentchat",
        note="`model_info` says what a model can do that AutoGen does not know. Without "
        "`max_tool_iterations` its assistant ends with the tool's result; with "
        "`reflect_on_tool_use` its last call has no tools, which is another prompt: a fork.",
    ),
    Recipe("Pydantic AI", "pydantic-ai", "pydantic_ai_agent", "pydantic-ai-slim"),
    Recipe(
        "LiteLLM",
        "litellm",
        "litellm_client",
        "litellm",
        environment=(("LITELLM_LOCAL_MODEL_COST_MAP", "True"),),
        note="Set `LITELLM_LOCAL_MODEL_COST_MAP=True`: else it downloads a price list at import.",
    ),
    Recipe(
        "smolagents",
        "smolagents",
        "smolagents_agent",
        "smolagents",
        forks=("edited_history", "other_tools", "new_conversation"),
        note='Set `tool_choice="auto"`: it asks for `"required"` by default, which masks the '
        "model's choice, and what was sampled under a mask is never trained. It writes tool calls "
        "into the history as text of its own and merges messages, so a turn does not continue the "
        "one before.",
    ),
    Recipe(
        "DSPy",
        "dspy",
        "dspy_agent",
        "dspy",
        forks=("new_conversation",),
        note="`cache=False` is what matters: DSPy answers a request it has seen from its cache, "
        "on disk too, and so a group of rollouts gets one sample many times. Every call of a "
        "module is a prompt of its own, so none continues another.",
    ),
]
