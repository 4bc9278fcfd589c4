"""Which SDKs the suite runs, and what is known of each beforehand."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SUITE = Path(__file__).parent
ROOT = SUITE.parents[2]
EXAMPLES = ROOT / "examples" / "sdks"
CHANGED = re.compile(r" *# whet: begin\n(.*?) *# whet: end\n", re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """One row of the table."""

    name: str
    """As its users write it."""
    pins: str
    """The list of packages in `pins/`: its environment."""
    example: str
    """Its file in `examples/sdks/`."""
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
        pinned = (SUITE / "pins" / f"{self.pins}.txt").read_text()
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
        note="The client adds another `/v1` to the base URL; the gateway accepts that.",
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
        note="`VLLMTokenRecorder` works as with vLLM: a test checks that `recorder.history` has "
        "exactly the token ids of the store. Training does not need it.",
    ),
    Recipe(
        "OpenAI Agents SDK",
        "openai-agents",
        "openai_agents",
        "openai-agents",
        dialect="responses",
        tracer="openai-agents",
        note="Call `set_tracing_disabled(True)` or set `OPENAI_AGENTS_DISABLE_TRACING=1`. "
        "Otherwise the SDK uploads traces to OpenAI, with the key of a rollout if it has no other. "
        "With `runner.tracer` the traces are stored with the rollout instead.",
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
        note="The tool is `mcp-server-calculator`, over MCP and stdio. The second request of a "
        "conversation refers to the first by `previous_response_id` and does not repeat it; the "
        "gateway reads it from the store.",
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
        note="`provider` is required: without it CrewAI rejects model names that it does not know. "
        "Set `CREWAI_DISABLE_TELEMETRY=true`, otherwise it sends telemetry to its makers.",
    ),
    Recipe("LangGraph, LangChain", "langgraph", "langgraph_agent", "langgraph"),
    Recipe(
        "AutoGen",
        "autogen",
        "autogen_agent",
        "autogen-agentchat",
        note="`model_info` describes the capabilities of a model that AutoGen does not know. "
        "Without `max_tool_iterations` the assistant ends with the tool's result. With "
        "`reflect_on_tool_use` its last call has no tools, so its prompt differs: a fork.",
    ),
    Recipe("Pydantic AI", "pydantic-ai", "pydantic_ai_agent", "pydantic-ai-slim"),
    Recipe(
        "LiteLLM",
        "litellm",
        "litellm_client",
        "litellm",
        environment=(("LITELLM_LOCAL_MODEL_COST_MAP", "True"),),
        note="Set `LITELLM_LOCAL_MODEL_COST_MAP=True`, otherwise it downloads a price list at "
        "import.",
    ),
    Recipe(
        "smolagents",
        "smolagents",
        "smolagents_agent",
        "smolagents",
        forks=("edited_history", "other_tools", "new_conversation"),
        note='Set `tool_choice="auto"`. The default, `"required"`, constrains sampling, and '
        "constrained generations are never trained. smolagents rewrites tool calls in the history "
        "as text and merges messages, so a turn does not continue the one before.",
    ),
    Recipe(
        "DSPy",
        "dspy",
        "dspy_agent",
        "dspy",
        forks=("new_conversation",),
        note="`cache=False` is required: DSPy answers repeated requests from its cache, also on "
        "disk, so that a group of rollouts would be one sample many times. Every call of a module "
        "has a prompt of its own, so no call continues another.",
    ),
]
