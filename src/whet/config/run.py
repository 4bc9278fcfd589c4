"""Config of a run, and how it is read: defaults, then the TOML file, then flags; the last wins.

Validators check, they never set. The resolved config is saved with the run.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, cast

from pydantic import Discriminator, Field, JsonValue, Tag, ValidationError, model_validator

from whet.config.learning import (
    AdamConfig,
    AlgorithmConfig,
    BudgetConfig,
    CheckpointsConfig,
    CurriculumConfig,
    EvaluationConfig,
    FailureRewardConfig,
    LengthConfig,
    LocalTrainerConfig,
    LoopConfig,
    LossConfig,
    SelectionConfig,
    SupervisedConfig,
    TinkerConfig,
    VerlConfig,
)
from whet.config.running import (
    DashboardConfig,
    GatewayConfig,
    LocalEngineConfig,
    RunnerConfig,
    SGLangConfig,
    TrackingConfig,
    VLLMConfig,
)
from whet.config.section import Section, changed_keys
from whet.config.suggestion import explain_unknown
from whet.errors import ConfigError


def _read_kind(section: object) -> object:
    """Tag of a union member: `kind`, which may be left out for the first one."""
    if isinstance(section, dict):
        return cast(dict[str, object], section).get("kind", "local")
    return getattr(section, "kind", None)


EngineConfig = Annotated[
    Annotated[LocalEngineConfig, Tag("local")]
    | Annotated[VLLMConfig, Tag("vllm")]
    | Annotated[SGLangConfig, Tag("sglang")],
    Discriminator(_read_kind),
]
TrainerConfig = Annotated[
    Annotated[LocalTrainerConfig, Tag("local")]
    | Annotated[TinkerConfig, Tag("tinker")]
    | Annotated[VerlConfig, Tag("verl")],
    Discriminator(_read_kind),
]

VERL_ALGORITHMS = ("grpo", "rloo", "reinforce++")
"""Algorithms of which the plugin of verl has an advantage estimator."""
SECTIONS_UNREAD_BY_VERL = (
    *("engine", "adam", "loss", "algorithm", "failure_reward", "length", "curriculum", "loop"),
    *("selection", "evaluation", "checkpoints", "budget", "tracking"),
)
"""Sections of which verl reads no key, or few."""

UNIONS: dict[str, tuple[type[Section], ...]] = {
    "engine": (LocalEngineConfig, VLLMConfig, SGLangConfig),
    "trainer": (LocalTrainerConfig, TinkerConfig, VerlConfig),
}
"""Sections whose keys depend on their `kind`; the first kind is the default."""

INTERNAL_KEYS = ("initial_weights",)
"""Keys of saved configs that whet sets itself: they have no flag and are not documented."""

RESERVED_MODELS = ("policy", "judge")
"""Model names that no policy may have: those of the only policy, and of the judge."""
POLICY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
POLICY_SECTIONS = {"trainer", "adam", "loss", "algorithm"}
"""Sections of which a policy may have keys of its own."""

Keys = dict[str, JsonValue]


class PolicyConfig(Section):
    """One of several policies of a run, by the name that agents send as their model. Its sections
    have the keys that differ from those of the run."""

    model: str | None = None
    """Its model, or the adapter or checkpoint it starts from; that of the run if absent."""
    initial_weights: Path | None = None
    """The adapter or checkpoint that it starts from, if `model` named one: set by whet."""
    frozen: bool = False
    """Serve it and never train it."""
    models: tuple[str, ...] = ()
    """Other model names for it."""
    trainer: Keys = Field(default={})
    """Keys of `[trainer]`."""
    adam: Keys = Field(default={})
    """Keys of `[adam]`."""
    loss: Keys = Field(default={})
    """Keys of `[loss]`."""
    algorithm: Keys = Field(default={})
    """Keys of `[algorithm]`, except `oversample`."""


class RunConfig(Section):
    """Config of a run: everything besides the agent and its tasks."""

    model: str = "tiny"
    """`tiny`, `smollm2`, a Hugging Face model folder, a GGUF file, or a name of the Hugging Face
    Hub; or the start of training: a run, one of its checkpoints, or a PEFT adapter."""
    initial_weights: Path | None = None
    """The adapter or checkpoint that training starts from, if `model` named one: set by whet, and
    `model` is then its base."""
    dir: Path = Path(".whet")
    """Directory of runs: each is in `<dir>/runs/<name>`."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] | None = None
    """Name of the run; made from the date if absent."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the task order and of new weights; samples are not seeded."""
    steps: Annotated[int, Field(ge=0)] = 20
    """Training steps."""
    tasks_per_step: Annotated[int, Field(ge=1)] = 8
    """Tasks in a step, each a group of rollouts."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Rollouts of each task in a step."""
    policies: dict[str, PolicyConfig] = Field(default={})
    """Several policies, each by the name that agents send as their model, with its own model,
    trainer settings, algorithm and checkpoints; if absent, one policy answers every call."""
    engine: EngineConfig = LocalEngineConfig()
    trainer: TrainerConfig = LocalTrainerConfig()
    adam: AdamConfig = AdamConfig()
    loss: LossConfig = LossConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    failure_reward: FailureRewardConfig = FailureRewardConfig()
    length: LengthConfig = LengthConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    loop: LoopConfig = LoopConfig()
    selection: SelectionConfig = SelectionConfig()
    supervised: SupervisedConfig = SupervisedConfig()
    runner: RunnerConfig = RunnerConfig()
    gateway: GatewayConfig = GatewayConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    budget: BudgetConfig = BudgetConfig()
    dashboard: DashboardConfig = DashboardConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def trained_weights(self) -> Literal["lora", "full"]:
        """Kind of the weights that are trained."""
        match self.trainer:
            case LocalTrainerConfig():
                return self.trainer.weights
            case TinkerConfig():
                return "lora"
            case VerlConfig():
                return "full"

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """Names of the policies that are trained; an empty one if there is only one policy."""
        if not self.policies:
            return ("",)
        return tuple(name for name, policy in self.policies.items() if not policy.frozen)

    def for_policy(self, name: str) -> "RunConfig":
        """The config of one of several policies: this one with the policy's values in place.

        That of the only policy, whose name is empty, is this one.

        Raises:
            ConfigError: they do not go together.
        """
        if not name:
            return self
        own = self.policies[name]
        values = merge(
            self.model_dump(mode="json", exclude={"policies"}),
            own.model_dump(mode="json", include=POLICY_SECTIONS),
        )
        if own.model is not None:
            weights = str(own.initial_weights) if own.initial_weights else None
            values = {**values, "model": own.model, "initial_weights": weights}
        try:
            return resolve(values)
        except ConfigError as error:
            raise ConfigError(f"policy {name!r}: {error}") from error

    @model_validator(mode="after")
    def _check_policies(self) -> Self:
        if not self.policies:
            return self
        kinds = {"engine": self.engine.kind, "trainer": self.trainer.kind}
        unsupported = [f"{k}.kind {v!r}" for k, v in kinds.items() if v in ("sglang", "verl")]
        unsupported += ["runner.ray"] if self.runner.ray else []
        if unsupported:
            raise ValueError(f"{unsupported[0]} supports only one policy: leave out 'policies'")
        if self.gateway.models:
            raise ValueError("gateway.models does not name a policy: use policies.NAME.models")
        taken = [*RESERVED_MODELS, *(each.partition("=")[0] for each in self.gateway.endpoints)]
        for name, policy in self.policies.items():
            for model in (name, *policy.models):
                if not POLICY_NAME.fullmatch(model):
                    raise ValueError(
                        f"invalid model name {model!r} of a policy: expected letters, digits, "
                        "'.', '_' or '-'"
                    )
                if model in taken:
                    raise ValueError(f"policy {name!r}: the model name {model!r} is taken")
                taken.append(model)
            self._check_policy(name)
        return self

    def _check_policy(self, name: str) -> None:
        policy, kind = self.policies[name], self.trainer.kind
        if policy.trainer.get("kind", kind) != kind:
            raise ValueError(
                f"policy {name!r}: expected trainer.kind {kind!r} like that of the run, found "
                f"{policy.trainer['kind']!r}"
            )
        try:
            own = self.for_policy(name)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if isinstance(own.trainer, LocalTrainerConfig) and own.trainer.gpus > 1:
            raise ValueError(
                f"policy {name!r}: trainer.gpus is {own.trainer.gpus}, but several policies are "
                "trained on one GPU: leave it out"
            )
        if self.engine.kind == "vllm" and own.trained_weights == "full" and not policy.frozen:
            raise ValueError(
                f"policy {name!r}: vLLM serves several policies as LoRA adapters of one base "
                "model: set trainer.weights to 'lora'"
            )
        greedy = "greedy" in {own.algorithm.name, self.algorithm.name}
        for key, is_common in {"oversample": True, "name": greedy}.items():
            found = getattr(own.algorithm, key)
            if is_common and found != getattr(self.algorithm, key):
                raise ValueError(
                    f"policy {name!r}: algorithm.{key} {found!r} would change how the rollouts of "
                    "all policies are sampled: set it for the run"
                )

    @model_validator(mode="after")
    def _check_mini_batches(self) -> Self:
        if self.loop.mini_batches > self.tasks_per_step:
            raise ValueError(
                f"loop.mini_batches is {self.loop.mini_batches}, but a step has "
                f"{self.tasks_per_step} tasks, which are not divided: raise tasks_per_step"
            )
        return self

    @model_validator(mode="after")
    def _check_selection(self) -> Self:
        endpoints = (endpoint.partition("=") for endpoint in self.gateway.endpoints)
        upstreams = {name: url for name, _, url in endpoints}
        for name in self.selection.models:
            if name in upstreams:
                raise ValueError(
                    f"selection.models names {name!r}, which is {upstreams[name]} by "
                    "gateway.endpoints: it answers with text, not token ids, and cannot be "
                    "trained; leave it out there"
                )
        return self

    @model_validator(mode="after")
    def _check_initial_weights(self) -> Self:
        if self.initial_weights is not None and self.trainer.kind == "tinker":
            raise ValueError(
                "trainer.kind 'tinker' starts from a base model, not an adapter or checkpoint: set "
                "model to its base"
            )
        return self

    @model_validator(mode="after")
    def _check_tinker(self) -> Self:
        if self.trainer.kind != "tinker":
            return self
        other_engine = {"kind"} if self.engine.kind != "local" else set[str]()
        unsupported = {
            "engine": changed_keys(self.engine) | other_engine,
            "loss": changed_keys(self.loss)
            & {"dual_clip", "correction", "old_logprobs", "kl", "entropy"},
        }
        for section, keys in unsupported.items():
            if keys:
                raise ValueError(
                    f"{section}.{min(keys)} is not supported with trainer.kind 'tinker': leave it "
                    "out"
                )
        if self.loss.is_custom:
            raise ValueError(
                f"the loss {self.loss.name!r} needs trainer.kind 'local': a Tinker service has "
                "losses of its own"
            )
        if self.loss.name == "dro":
            raise ValueError(
                "loss.name 'dro' of a Tinker service also changes tokens that were not sampled: "
                "choose another loss"
            )
        if self.runner.temperature not in (None, 1.0):
            raise ValueError(
                "a Tinker service trains only at runner.temperature 1, found "
                f"{self.runner.temperature}: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_verl(self) -> Self:
        if self.trainer.kind != "verl":
            return self
        if self.algorithm.name not in VERL_ALGORITHMS:
            raise ValueError(
                f"algorithm.name {self.algorithm.name!r} is not supported with trainer.kind "
                f"'verl': choose {', '.join(VERL_ALGORITHMS)}, or an estimator of verl by "
                "trainer.overrides"
            )
        read = {"algorithm": {"name", "divide_by_std"}, "adam": {"lr"}}
        for name in SECTIONS_UNREAD_BY_VERL:
            section = getattr(self, name)
            kind = {"kind"} if getattr(section, "kind", "local") != "local" else set[str]()
            if unread := (changed_keys(section) | kind) - read.get(name, set[str]()):
                raise ValueError(
                    f"{name}.{min(unread)} is not supported with trainer.kind 'verl': leave it "
                    "out, and use trainer.overrides"
                )
        if self.initial_weights is not None:
            raise ValueError(
                "verl starts from a model folder, not an adapter or checkpoint: merge it into its "
                "base model"
            )
        return self


def merge(base: Mapping[str, JsonValue], over: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """`base` with the values of `over` in their places, section by section."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = merge(below, value)
        merged[key] = value
    return merged


def read_toml(path: Path) -> dict[str, JsonValue]:
    """Read a TOML file. Raises ConfigError if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is not TOML: {error}") from error


def list_leaves(
    values: Mapping[str, JsonValue], prefix: str = ""
) -> Iterator[tuple[str, JsonValue]]:
    """The values of a nested config by their dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from list_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def resolve(values: Mapping[str, JsonValue]) -> RunConfig:
    """Validate config values. Raises ConfigError with the first error, in one line."""
    for key, value in list_leaves(values):
        for text in map(str, value if isinstance(value, list | tuple) else (value,)):
            try:
                text.encode()
            except UnicodeEncodeError as error:  # safetensors and the saved config are UTF-8
                raise ConfigError(f"config key {key!r}: expected UTF-8, found {text!r}") from error
    try:
        return RunConfig.model_validate(dict(values))
    except ValidationError as error:
        text = explain(error)
        if not text.startswith(UNKNOWN_KEY):
            raise ConfigError(text) from error
        stop = "" if text.endswith("?") else ";"
        raise ConfigError.phrase(
            python=text, command=f"{text}{stop} `whet train --help-config` lists the keys"
        ) from error


UNKNOWN_KEY = "unknown config key"


def explain(error: ValidationError) -> str:
    """Return the first error that pydantic found, in one line that names the key."""
    first = error.errors()[0]
    section, *rest = first["loc"] or ("",)
    if section in UNIONS and rest:  # pydantic puts the union's tag after the section
        kind, *rest = rest
        if first["type"] == "extra_forbidden" and len(rest) == 1:
            return _explain_other_kind(str(section), str(kind), str(rest[0]))
    key = ".".join(str(part) for part in (section, *rest))
    if first["type"] == "union_tag_invalid":
        kinds = [_read_kind_name(member) for member in UNIONS[str(section)]]
        found = first["input"]["kind"]
        return f"config key '{key}.kind': expected one of {', '.join(kinds)}, found {found!r}"
    if first["type"] == "union_tag_not_found":
        return f"config key {key!r}: expected a section with keys, found {first['input']!r}"
    if first["type"] == "extra_forbidden":
        hint = explain_unknown(key, {each: repr(each) for each in _list_keys()})
        return f"{UNKNOWN_KEY} {key!r}" + (f": {hint}" if hint else "")
    if first["type"] == "string_pattern_mismatch":
        expected = "letters, digits, '_', '.' and '-', the first a letter or digit"
        return f"config key {key!r}: expected {expected}, found {first['input']!r}"
    if isinstance(first["input"], dict):  # a whole section: its keys do not go together
        why = first["msg"].removeprefix("Value error, ")
        return f"config section {key!r}: {why}" if key else why
    return f"config key {key!r}: {first['msg'].lower()}, found {first['input']!r}"


def _explain_other_kind(section: str, kind: str, key: str) -> str:
    fields = {_read_kind_name(member): set(member.model_fields) for member in UNIONS[section]}
    others = " and ".join(repr(name) for name, keys in fields.items() if key in keys)
    known = f"{kind!r} has {', '.join(sorted(fields[kind] - {'kind'}))}"
    if not others:
        return f"{UNKNOWN_KEY} '{section}.{key}': {section}.kind {known}"
    return (
        f"config key '{section}.{key}' does not apply to {section}.kind {kind!r}, but to {others}: "
        f"{known}"
    )


def _list_keys() -> Iterator[str]:
    """The keys of a run, with their sections."""
    for name, field in RunConfig.model_fields.items():
        sections = UNIONS.get(name, (field.annotation,))
        below = [each for each in sections if isinstance(each, type) and issubclass(each, Section)]
        yield from (f"{name}.{key}" for each in below for key in each.model_fields)
        if not below and name not in INTERNAL_KEYS:
            yield name


def _read_kind_name(member: type[Section]) -> str:
    return str(member.model_fields["kind"].default)
