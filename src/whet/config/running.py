"""Config sections of processes: engine, runners, gateway, dashboard and trackers."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from whet.config.section import Section, changed_keys

TracerName = Literal["otel", "openai-agents"]


class _EngineSection(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model in this process; `auto` is a GPU if torch finds one."""
    max_context: Annotated[int, Field(ge=16)] | None = None
    """Maximum prompt plus completion in tokens; the model's own limit if absent."""


class LocalEngineConfig(_EngineSection):
    """Sample from the model in this process."""

    kind: Literal["local"] = "local"
    kv_tokens: Annotated[int, Field(ge=1024)] = 65_536
    """Tokens of key-value cache, which bounds memory and the running batch."""


class VLLMConfig(_EngineSection):
    """Sample from vLLM servers: running ones, or some that are started."""

    kind: Literal["vllm"] = "vllm"
    urls: tuple[str, ...] = ()
    """Running servers, all with the same model and flags; vLLM servers are started if absent."""
    command: str = "vllm"
    """The `vllm` program to start, such as that of another environment."""
    flags: tuple[str, ...] = ()
    """Flags for `vllm serve`, passed on unchanged; on the command line, whatever follows `--`."""
    replicas: Annotated[int, Field(ge=1)] | None = None
    """Servers to start, each on GPUs of its own. If absent, one for every GPU that `trainer.gpus`
    leaves, or one beside the trainer; `whet serve` starts one."""

    @model_validator(mode="after")
    def _check_launch(self) -> Self:
        if self.urls and changed_keys(self) & {"command", "flags", "replicas"}:
            raise ValueError(
                "command, flags and replicas are for servers that whet starts: leave them "
                "out, or leave out urls"
            )
        if (self.replicas or 1) > 1 and any(flag.startswith("--port") for flag in self.flags):
            raise ValueError("each of several replicas gets its own port: leave out --port")
        return self


class SGLangConfig(_EngineSection):
    """Sample from running SGLang servers."""

    kind: Literal["sglang"] = "sglang"
    urls: tuple[str, ...] = ()
    """Running servers, all with the same model and flags; required with `sglang`."""

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        if not self.urls:
            raise ValueError(
                "engine.kind 'sglang' needs urls of running servers: only 'vllm' is started"
            )
        return self


class RunnerConfig(Section):
    """Execution of agents."""

    concurrency: Annotated[int, Field(ge=1)] = 64
    """Attempts that run at once, in all processes."""
    processes: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Processes to run agents in: 0 runs all attempts in this process; as many as `concurrency`
    gives each attempt a process of its own. If absent, the larger of half the cores and all but
    four, at most 12; 0 with at most two cores, for a command or a service, or for an agent that
    cannot be imported by name."""
    tracer: TracerName | None = None
    """Record the spans of an agent's SDK: `otel` those of OpenTelemetry, `openai-agents` those of
    the OpenAI Agents SDK, which are then not uploaded."""
    ray: str | None = None
    """Run agents on a Ray cluster: its address, `auto` for the one of this machine, or `local` for
    one in this process; the agent must be importable by name on every node."""
    ray_runners: Annotated[int, Field(ge=0)] = 2
    """Runners on the cluster, which share `concurrency`; `whet runner --scale` changes it."""
    ray_cpus: Annotated[float, Field(gt=0)] = 1.0
    """CPUs that each of these runners reserves there."""
    lease_s: Annotated[float, Field(ge=1)] = 30.0
    """Seconds without a heartbeat before a runner counts as dead and its attempts run again."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Time limit of one attempt in seconds."""
    max_attempts: Annotated[int, Field(ge=1)] = 2
    """Attempts of a rollout whose agent raises or whose worker dies."""
    temperature: Annotated[float, Field(gt=0, le=10)] | None = None
    """Temperature of training rollouts; the agent's own if absent."""


class GatewayConfig(Section):
    """The endpoint that agents call."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 is any free one."""
    processes: Annotated[int, Field(ge=0, le=64)] | None = None
    """Gateway processes of a run on one machine; 0 runs the gateway in the process that trains. If
    absent one for every 4 cores, at most 2, at most 1 with a fixed `gateway.port`; 0 with several
    policies, with `runner.ray`, or where `runner.processes` is 0."""
    models: tuple[str, ...] = ()
    """Other model names for the policy."""
    endpoints: tuple[str, ...] = ()
    """Other models for agents, each `NAME=MODEL@URL` of an OpenAI-compatible API: text only, never
    recorded, never trained. The key is in `WHET_NAME_KEY`, else in `OPENAI_API_KEY`."""
    judge: str | None = None
    """A model that agents and judges reach as `judge`: text only, never recorded, never trained.
    `base` is the model of the run before training; else any name that `model` accepts. It is
    loaded in this process, beside the policy."""
    trace_header: str = "trace_id"
    """Request header that may name the attempt, besides the URL and the API key."""
    allow_unattributed: bool = False
    """Serve calls that name no attempt, with the gateway's own key; they are never recorded."""
    keep_thinking: bool = False
    """Keep the thinking of earlier turns in the context even where the template drops it."""


class DashboardConfig(Section):
    """The pages about a run that are served while it trains in this process."""

    serve: bool = True
    """Serve the dashboard beside a run, and print a link; never with `--quiet`."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 is any free one."""


class TrackingConfig(Section):
    """Trackers of a run's metrics, besides the terminal and the store."""

    names: tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow"], ...] = ("jsonl",)
    """Any of `jsonl`, `tensorboard`, `wandb` and `mlflow`; all but the first need an extra."""
    project: Annotated[str, Field(min_length=1)] = "whet"
    """The project of W&B, and the experiment of MLflow."""
    wandb_mode: Literal["online", "offline"] | None = None
    """`offline` needs no account; W&B's own setting if absent."""
    mlflow_uri: str | None = None
    """MLflow's server or database; `MLFLOW_TRACKING_URI`, else `<dir>/mlflow.db`, if absent."""
