"""The one typed run config. No heavy imports, no side effects; validators check, they never set.

Last wins among defaults, the TOML file and flags. The resolved config is saved with the run.
"""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from whet.errors import ConfigError


class Section(BaseModel):
    """A part of the config: immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class EngineConfig(Section):
    """What samples: the model in this process, or servers."""

    kind: Literal["local", "vllm", "sglang"] = "local"
    """`local` is the model in this process; the others are servers, which run already or, with
    `vllm`, are started. `--engine` for short."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Of the model in this process; `auto` takes a GPU if torch finds one."""
    max_context: Annotated[int, Field(ge=16)] | None = None
    """Longest prompt plus answer in tokens; the model's own limit if absent."""
    kv_tokens: Annotated[int, Field(ge=1024)] = 65_536
    """`local`: tokens of key-value cache to hold, which bounds memory and the batch in flight."""
    urls: tuple[str, ...] = ()
    """Servers that run already, all with the same model and flags; else one `vllm` is started."""
    command: str = "vllm"
    """The `vllm` program, such as that of another environment."""
    flags: tuple[str, ...] = ()
    """For `vllm serve`, passed on as they are; on the command line, whatever follows `--`."""
    max_active: Annotated[int, Field(ge=1)] = 256
    """Requests that a server is given at once."""
    max_waiting: Annotated[int, Field(ge=0)] = 4096
    """Requests that wait while no server has room; further ones are told to come again."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        fields = type(self).model_fields
        given = {name for name in fields if getattr(self, name) != fields[name].default}
        of_servers = given & {"urls", "command", "flags", "max_active", "max_waiting"}
        if self.kind == "local" and of_servers:
            raise ValueError(
                f"{', '.join(sorted(of_servers))} is for servers: set engine.kind to 'vllm' or "
                "'sglang', or leave it out"
            )
        if self.kind != "local" and "kv_tokens" in given:
            raise ValueError("kv_tokens is for the local engine: servers have flags of their own")
        if self.urls and given & {"command", "flags"}:
            raise ValueError("command and flags are for a server that is started, not for urls")
        if self.kind == "sglang" and not self.urls:
            raise ValueError("name the SGLang servers with urls: only 'vllm' is started")
        return self


class TrainerConfig(Section):
    """What trains: this process, or a Tinker service, which then samples too."""

    kind: Literal["local", "tinker"] = "local"
    """`tinker` trains and samples with the service of `[tinker]`. `--trainer` for short."""
    weights: Literal["lora", "full"] = "lora"
    """Train low-rank adapters, or all weights."""
    lora_rank: Annotated[int, Field(ge=1)] = 16
    """Of the adapters."""
    lora_alpha: Annotated[int, Field(ge=1)] = 32
    """Adapters count `lora_alpha / lora_rank`."""
    lora_layers: Annotated[tuple[Literal["attention", "mlp", "head"], ...], Field(min_length=1)] = (
        "attention",
        "mlp",
    )
    """Whose linear layers have adapters; `head` is the one that gives logits."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """What sampler and trainer compute in; `auto` is `bf16` on a GPU, `fp32` on a CPU.
    Log-probabilities, trained weights and optimizer are fp32 in any case."""
    micro_batch_tokens: Annotated[int, Field(ge=64)] | None = None
    """Tokens in one forward and backward pass; shared prefixes count once. If absent 2048 on a CPU,
    and on a GPU what fills about half of it. Halved when memory runs out."""
    gradient_checkpointing: bool = False
    """Compute every layer twice to keep less of it: slower, for a fraction of the memory."""
    compile: bool = False
    """Compile the layers for training: up to a minute at the first step, then faster ones; for a
    GPU and long runs."""
    keep_reference: bool = False
    """Keep a copy of the weights as they were, for `loss.kl` with full weights."""


class TinkerConfig(Section):
    """A service that the `tinker` client talks to: hosted, or `whet tinker-server`. Its key is in
    `TINKER_API_KEY`."""

    base_url: str | None = None
    """Where it is; `TINKER_BASE_URL`, else the hosted one, if absent."""
    base_model: str | None = None
    """What it calls the model, whose tokenizer and template are in the folder `model`; `model` if
    absent."""


class AdamConfig(Section):
    """AdamW."""

    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up: stay, or fall to 0 at the end of the run."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the rate rises to `lr`."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the gradient's running mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of the squared gradient's running mean."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled from the gradient."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Longer gradients are scaled down to it."""

    def at(self, step: int, steps: int) -> "AdamConfig":
        """These settings with the learning rate of one step of a run; the first is 0.

        A function of nothing else, so a resumed run goes on where it was.
        """
        share = min(1.0, (step + 1) / (self.warmup_steps + 1))
        past = max(0, step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        match self.schedule:
            case "constant":
                pass
            case "linear":
                share *= 1 - past
            case "cosine":
                share *= (1 + math.cos(math.pi * past)) / 2
        return self.model_copy(update={"lr": self.lr * share})


class LossConfig(Section):
    """The loss of a sampled token, named as Tinker names it where both exist."""

    name: Literal["ppo", "importance_sampling", "cispo", "gspo", "dro", "cross_entropy"] = "ppo"
    """`ppo` and `gspo` clip the ratio of new to sampled probability, of a token or of a whole row;
    `cispo` clips what the ratio weighs; `importance_sampling` does not clip; `dro` is held near the
    sampler by a square; `cross_entropy` imitates."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """How far below 1 the ratio counts; for `ppo`, `gspo` and `cispo`."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """How far above 1 the ratio counts; for `ppo`, `gspo` and `cispo`."""
    max_ratio: Annotated[float, Field(ge=1)] | None = None
    """The most that a ratio weighs in the gradient, where sampler and trainer disagree; for `ppo`,
    `gspo` and `importance_sampling`."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the square; for `dro`."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Penalty on the divergence from the model before training; 0 is off."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Bonus on the entropy of the distribution; 0 is off."""
    normalise: Literal["token", "rollout", "constant"] = "token"
    """`token`: every sampled token of the step weighs the same; `rollout`: every rollout does;
    `constant`: tokens weigh the same in every step, so that longer rollouts weigh more."""
    tokens_per_rollout: Annotated[int, Field(ge=1)] | None = None
    """What `constant` divides a rollout's sum by; for instance the longest answer."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.max_ratio is not None and self.name not in ("ppo", "gspo", "importance_sampling"):
            raise ValueError(f"max_ratio has no meaning for {self.name!r}: leave it out")
        if (self.tokens_per_rollout is None) == (self.normalise == "constant"):
            raise ValueError("tokens_per_rollout and normalise='constant' are given together")
        return self


class AlgorithmConfig(Section):
    """How rewards become credit. A key that the chosen algorithm does not read is refused."""

    name: str = "grpo"
    """`grpo`, `rloo`, `reinforce`, `reinforce++`, `positive`, `greedy`, `best_of_n`,
    `distillation`, or your own as `module:Class` or `file.py:Class`."""
    credit: Literal["attempt", "turn"] = "attempt"
    """`attempt`: every answer of a rollout is worth what the attempt earned; `turn`: each what
    was earned from it on, with rewards for turns, calls and agents."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What a reward counts one turn earlier, with `credit` by `turn`."""
    reward_keys: tuple[str, ...] = ()
    """Further keys of emitted rewards that are added to the reward."""
    logged_keys: tuple[str, ...] = ()
    """Keys of emitted rewards that are logged and not learned from; any other key is an error."""
    divide_by_std: bool = False
    """`grpo`: divide by the group's standard deviation, as its paper does."""
    group_baseline: bool = False
    """`reinforce++`: subtract each group's mean before normalising over the step."""
    baseline_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """`reinforce`: what is kept of the running mean of rewards from step to step."""
    success: float = 1.0
    """`greedy`: the reward from which an answer counts as right."""
    teacher: str | None = None
    """`distillation`: the model to learn from, named like `model`."""
    refill: Annotated[int, Field(ge=1)] = 1
    """Draw further tasks for silent groups, up to this many times `tasks_per_step` in all."""


class LoopConfig(Section):
    """How collecting and training take turns."""

    name: Literal["on_policy", "overlapped"] = "on_policy"
    """`on_policy`: a step's rollouts are sampled by the weights it changes; `overlapped`: those of
    later steps run while a step is trained."""
    max_staleness: Annotated[int, Field(ge=1)] = 1
    """`overlapped`: how many updates behind a sampled token may be when it is trained."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.name == "on_policy" and self.max_staleness != 1:
            raise ValueError("max_staleness has no meaning on policy: leave it out")
        return self


class SelectionConfig(Section):
    """Which calls are trained; the others stay context. What is empty leaves nothing out."""

    agents: tuple[str, ...] = ()
    """Names of agents, as told by URL or header."""
    models: tuple[str, ...] = ()
    """Model names that calls asked for."""
    system_contains: str = ""
    """Text that the conversation's system prompt must contain."""
    tools: tuple[str, ...] = ()
    """Tools that the call must have been offered."""


TracerName = Literal["otel", "openai-agents"]


class RunnerConfig(Section):
    """How agents are run."""

    concurrency: Annotated[int, Field(ge=1)] = 64
    """Attempts that run at once."""
    processes: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes to run agents in, one attempt in each at a time, for agents that keep a core busy;
    0 runs all attempts in this process."""
    tracer: TracerName | None = None
    """Keep the spans that an agent's SDK makes of itself: `otel` those of OpenTelemetry,
    `openai-agents` those of the OpenAI Agents SDK, which are then not uploaded."""
    lease_s: Annotated[float, Field(ge=1)] = 30.0
    """A runner that is silent for so long is dead, and what it ran is run again."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """The limit of one attempt."""
    max_attempts: Annotated[int, Field(ge=1)] = 2
    """How often a rollout is tried when its agent raises or its worker dies."""
    temperature: Annotated[float, Field(gt=0, le=10)] | None = None
    """Forced on training rollouts; what the agent asks for if absent."""


class GatewayConfig(Section):
    """The endpoint agents talk to."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes any free port."""
    models: tuple[str, ...] = ()
    """Further model names that agents may ask for; the same policy answers."""
    endpoints: tuple[str, ...] = ()
    """Models elsewhere that agents may ask for, each `NAME=MODEL@URL` of an OpenAI-compatible API:
    text only, never recorded, never trained. `WHET_NAME_KEY`, else `OPENAI_API_KEY`, is the key."""
    trace_header: str = "trace_id"
    """The request header that may name the attempt, besides the URL and the API key."""
    allow_unattributed: bool = False
    """Serve calls that name no attempt, with the gateway's own key; they are never recorded."""
    keep_thinking: bool = False
    """Continue from stored turns with their thinking even where the template would drop it."""


class EvaluationConfig(Section):
    """How models are compared on held-out tasks: before and after training, and by `whet eval`."""

    greedy: bool = True
    """Try every task once at temperature 0."""
    samples: Annotated[int, Field(ge=0, le=1000)] = 1
    """How often every task is tried by sampling; pass@k is told for k up to this."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Of the samples."""
    pass_reward: float = 1.0
    """The reward from which on a sample passes, for pass@k."""
    bootstrap: Annotated[int, Field(ge=100)] = 10_000
    """Resamples behind the 95 % interval."""


class TrackingConfig(Section):
    """Where the numbers of a run go, besides the terminal and its store."""

    names: tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow"], ...] = ("jsonl",)
    """Any of `jsonl`, `tensorboard`, `wandb` and `mlflow`; all but the first need an extra."""
    project: Annotated[str, Field(min_length=1)] = "whet"
    """The project of W&B, and the experiment of MLflow."""
    wandb_mode: Literal["online", "offline"] | None = None
    """`offline` needs no account; as W&B's own settings say if absent."""
    mlflow_uri: str | None = None
    """MLflow's server or database; `MLFLOW_TRACKING_URI`, else `<dir>/mlflow.db`, if absent."""


class RunConfig(Section):
    """Everything a run depends on, besides the agent and its tasks."""

    model: str = "tiny"
    """`tiny`, `smollm2`, or a Hugging Face model folder."""
    dir: Path = Path(".whet")
    """Runs live in `<dir>/runs/<name>`."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] | None = None
    """Of the run; made from the date if absent."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of task order and new weights. Samples are never seeded by it."""
    steps: Annotated[int, Field(ge=0)] = 20
    """Updates of the policy."""
    tasks_per_step: Annotated[int, Field(ge=1)] = 8
    """Groups in a step."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Rollouts of each task in a step."""
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    tinker: TinkerConfig = TinkerConfig()
    adam: AdamConfig = AdamConfig()
    loss: LossConfig = LossConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    loop: LoopConfig = LoopConfig()
    selection: SelectionConfig = SelectionConfig()
    runner: RunnerConfig = RunnerConfig()
    gateway: GatewayConfig = GatewayConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _has_a_reference(self) -> Self:
        if self.loss.kl and self.trainer.weights == "full" and not self.trainer.keep_reference:
            raise ValueError(
                "loss.kl needs the weights as they were before training: set "
                "trainer.keep_reference to keep a copy, or trainer.weights to 'lora'"
            )
        return self

    @model_validator(mode="after")
    def _trains_what_is_recorded(self) -> Self:
        elsewhere = {
            name: url for name, _, url in (e.partition("=") for e in self.gateway.endpoints)
        }
        for name in self.selection.models:
            if name in elsewhere:
                raise ValueError(
                    f"selection.models names {name!r}, which is {elsewhere[name]} by "
                    "gateway.endpoints: it answers with text, not token ids, and cannot be "
                    "trained; leave it out there"
                )
        return self

    @model_validator(mode="after")
    def _is_for_its_trainer(self) -> Self:
        if self.trainer.kind == "local":
            if self.tinker != TinkerConfig():
                raise ValueError("[tinker] is read with trainer.kind 'tinker': leave it out")
            return self
        given = {
            "trainer": _changed(self.trainer) - {"kind", "lora_rank", "lora_layers"},
            "engine": _changed(self.engine),
            "loss": _changed(self.loss) & {"max_ratio", "kl", "entropy"},
        }
        for section, keys in given.items():
            if keys:
                raise ValueError(
                    f"{section}.{min(keys)} has no meaning with trainer.kind 'tinker', whose "
                    "service decides it or cannot do it: leave it out"
                )
        if self.loss.name == "dro":
            raise ValueError(
                "loss.name 'dro' of a Tinker service also pulls at tokens that were not sampled: "
                "choose another"
            )
        if self.runner.temperature not in (None, 1.0):
            raise ValueError("a Tinker service trains at runner.temperature 1 alone")
        return self


def _changed(section: Section) -> set[str]:
    fields = type(section).model_fields
    return {name for name in fields if getattr(section, name) != fields[name].default}


def merge(base: Mapping[str, JsonValue], over: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """`base` with the leaves of `over` put in their places."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = merge(below, value)
        merged[key] = value
    return merged


def read_toml(path: Path) -> dict[str, JsonValue]:
    """The keys a TOML file sets. Raises ConfigError if there is no such file or it is not TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is not TOML: {error}") from error


def resolve(values: Mapping[str, JsonValue]) -> RunConfig:
    """The config these values make; the first thing wrong with them as one ConfigError."""
    try:
        return RunConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(explain(error)) from error


def explain(error: ValidationError) -> str:
    """The first fault pydantic found, in one line that names the key."""
    fault = error.errors()[0]
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"unknown config key {key!r}: `whet train --help` lists the keys"
    if isinstance(fault["input"], dict):  # a whole section: its keys do not go together
        why = fault["msg"].removeprefix("Value error, ")
        return f"config section {key!r}: {why}" if key else why
    return f"config key {key!r}: {fault['msg'].lower()}, found {fault['input']!r}"
