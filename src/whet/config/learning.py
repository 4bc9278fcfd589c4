"""Config sections of training: trainer, loss, algorithm, rewards, loop, evaluation, limits."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from whet.config.section import Section, changed_keys

Layer = Literal["attention", "mlp", "head"]

UNSHARDED_KEYS = {"compile", "optimizer"}
"""Keys of the local trainer that a sharded model does not support."""


class LocalTrainerConfig(Section):
    """Train in this process."""

    kind: Literal["local"] = "local"
    weights: Literal["lora", "full"] = "lora"
    """Train low-rank adapters, or all weights."""
    lora_rank: Annotated[int, Field(ge=1)] = 16
    """Rank of the adapters."""
    lora_alpha: Annotated[int, Field(ge=1)] = 32
    """Adapters are scaled by `lora_alpha / lora_rank`."""
    lora_layers: Annotated[tuple[Layer, ...], Field(min_length=1)] = ("attention", "mlp")
    """Linear layers with adapters: `attention`, `mlp`, `head` (the language-model head)."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute type of sampler and trainer; `auto` is `bf16` on a GPU, `fp32` on a CPU.
    Log-probabilities and trained weights are always fp32."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with moments in fp32, or in 8 bits by `bitsandbytes`, which is installed apart."""
    micro_batch_tokens: Annotated[int, Field(ge=64)] | None = None
    """Tokens in one forward and backward pass; shared prefixes count once. If absent 2048 on a CPU,
    and on a GPU as many as fill about half its memory. Halved when memory runs out."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, for a fraction of the memory."""
    gpus: Annotated[int, Field(ge=1)] = 1
    """GPUs of this machine to train on, each with its own process; without a GPU, the number of
    processes. Each gets rows with about as many tokens; the first GPU samples too."""
    shard: Literal["auto", "on", "off"] = "auto"
    """With `gpus`: divide the trained model, its gradient and its optimizer among them (FSDP2), or
    have a copy on each; `auto` divides what would fill more than half of a GPU."""
    compile: bool = False
    """Compile the layers for training: up to a minute at the first step, then faster; for a GPU and
    long runs."""

    @model_validator(mode="after")
    def _check_shard(self) -> Self:
        if self.shard != "on":
            return self
        if self.gpus == 1:
            raise ValueError(
                "shard 'on' divides the model among several GPUs, found gpus 1: set gpus too"
            )
        if unsupported := changed_keys(self) & UNSHARDED_KEYS:
            raise ValueError(
                f"{min(unsupported)} is not supported with shard 'on': leave it out, or set "
                "shard to 'off'"
            )
        return self


class TinkerConfig(Section):
    """Train and sample at a service of the `tinker` API: hosted, or `whet tinker-server`. Its key
    is in `TINKER_API_KEY`."""

    kind: Literal["tinker"] = "tinker"
    base_url: str | None = None
    """Address of the service; `TINKER_BASE_URL`, else the hosted one, if absent."""
    base_model: str | None = None
    """The service's name of the model, whose tokenizer and template are in the folder `model`;
    `model` if absent."""
    lora_rank: Annotated[int, Field(ge=1)] = 16
    """Rank of the adapters."""
    lora_layers: Annotated[tuple[Layer, ...], Field(min_length=1)] = ("attention", "mlp")
    """Linear layers with adapters: `attention`, `mlp`, `head` (the language-model head)."""


class VerlConfig(Section):
    """Train with verl on a Ray cluster, in an environment of its own."""

    kind: Literal["verl"] = "verl"
    preset: Literal["tiny", "one-gpu", "node"] = "one-gpu"
    """Sizes to start from: a check of the path, one GPU, one machine with eight."""
    python: str | None = None
    """Python of the environment that has verl; this one if absent."""
    overrides: tuple[str, ...] = ()
    """Keys of verl's own config, each as `key=value`; an unknown one is an error before Ray
    starts."""


class AdamStep(Section):
    """Parameters of one AdamW step."""

    lr: Annotated[float, Field(gt=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


LEARNING_RATES = {"lora": 1e-4, "full": 1e-6}
"""Default learning rate by kind of weights; for full weights that of TRL and verl."""


class AdamConfig(Section):
    """AdamW, with a learning-rate schedule."""

    lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate; if absent 1e-4 for adapters and 1e-6 for full weights."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or decaying to 0 at the end of the run."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises to `lr`."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this norm."""

    def build_step(self, step: int, steps: int, weights: Literal["lora", "full"]) -> AdamStep:
        """Parameters of one step of a run that trains these weights; the first step is 0.

        A pure function, so a resumed run continues the schedule.
        """
        lr = LEARNING_RATES[weights] if self.lr is None else self.lr
        scale = min(1.0, (step + 1) / (self.warmup_steps + 1))
        progress = max(0, step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        match self.schedule:
            case "constant":
                pass
            case "linear":
                scale *= 1 - progress
            case "cosine":
                scale *= (1 + math.cos(math.pi * progress)) / 2
        # Not validated: the last steps of a schedule may have a rate of 0.
        return AdamStep.model_construct(
            lr=lr * scale,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )


LOSS_NAMES = ("ppo", "importance_sampling", "cispo", "gspo", "dro", "cross_entropy")
CLIPPED_LOSSES = ("ppo", "gspo", "cispo")
CLIP_RANGES = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
"""Default `clip_low` and `clip_high` of the losses that need others than 0.2 and 0.28."""


class LossConfig(Section):
    """The loss of a sampled token, named as Tinker names it where both exist."""

    name: str = "ppo"
    """`ppo` and `gspo` clip the ratio of trained to sampled probability, of a token or of a row;
    `cispo` clips the weight of the ratio; `importance_sampling` does not clip; `dro` adds a squared
    penalty on the distance from the sampler; `cross_entropy` imitates; or your own as
    `module:function` or `file.py:function`."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Lower clip range of the ratio, below 1; if absent 0.2, for `gspo` 3e-4, for `cispo` 1."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """Upper clip range of the ratio, above 1; if absent 0.28, for `gspo` 4e-4, for `cispo` 4."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Ratio beyond which a token with a negative advantage has no gradient (verl's `clip_ratio_c`,
    TRL's `delta`); for `ppo` and `gspo`."""
    correction: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = None
    """Correction of a sampler whose probabilities differ from the trainer's, named as in TRL:
    truncate the importance weight of tokens or rows to `correction_max` (TIS), or drop those beyond
    it (MIS)."""
    correction_max: Annotated[float, Field(ge=1)] = 3.0
    """Maximum importance weight, with `correction`."""
    correction_min: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Minimum importance weight, with `token_mask` or `sequence_mask`: tokens or rows below it are
    dropped."""
    old_logprobs: Literal["sampler", "recomputed"] = "sampler"
    """Probability that ratios are relative to: the sampler's, or the trainer's before the first
    update of a step."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the squared penalty; for `dro`."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL penalty against the model before training, or the start of training if
    `model` names one; 0 is off."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the entropy bonus; 0 is off."""
    normalize: Literal["token", "rollout", "constant"] = "token"
    """`token`: every sampled token of an update weighs the same; `rollout`: every rollout does;
    `constant`: tokens weigh the same in every update, so that longer rollouts weigh more."""
    tokens_per_rollout: Annotated[int, Field(ge=1)] | None = None
    """With `normalize` `constant`: divisor of the sum over a rollout's tokens, such as the number
    of tokens of the longest answer."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """The range that ratios are clipped to."""
        low, high = CLIP_RANGES.get(self.name, (0.2, 0.28))
        return (
            1 - (low if self.clip_low is None else self.clip_low),
            1 + (high if self.clip_high is None else self.clip_high),
        )

    @property
    def is_custom(self) -> bool:
        """Whether the loss is a function of the user's."""
        return ":" in self.name

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.name not in LOSS_NAMES and not self.is_custom:
            raise ValueError(
                f"unknown loss {self.name!r}: choose among {', '.join(LOSS_NAMES)}, or name your "
                "own as module:function or file.py:function"
            )
        for key, field in type(self).model_fields.items():
            unread = not self.is_custom and key not in self._read_keys()
            if unread and getattr(self, key) != field.default:
                raise ValueError(f"{key} has no meaning for {self.name!r}: leave it out")
        if self.correction is None and (self.correction_max, self.correction_min) != (3.0, 0.0):
            raise ValueError(
                "correction_max and correction_min need a correction: set it, or leave them out"
            )
        if self.correction_min and self.correction not in ("token_mask", "sequence_mask"):
            raise ValueError(
                "correction_min needs correction 'token_mask' or 'sequence_mask': leave it out"
            )
        in_ratio = self.old_logprobs == "sampler" and self.name in ("cispo", "gspo")
        if in_ratio and self.correction in ("token_truncate", "sequence_truncate"):
            raise ValueError(
                f"{self.name!r} bounds its own ratio to the sampler: choose correction "
                "'token_mask' or 'sequence_mask', or old_logprobs 'recomputed'"
            )
        if (self.tokens_per_rollout is None) == (self.normalize == "constant"):
            raise ValueError("tokens_per_rollout and normalize 'constant' must be set together")
        return self

    def _read_keys(self) -> set[str]:
        """Keys that a built-in loss reads."""
        keys = {"name", "kl", "entropy", "normalize", "tokens_per_rollout"}
        if self.name in CLIPPED_LOSSES:
            keys |= {"clip_low", "clip_high"}
        if self.name in ("ppo", "gspo"):
            keys |= {"dual_clip"}
        if self.name == "dro":
            keys |= {"beta"}
        if self.name in (*CLIPPED_LOSSES, "importance_sampling"):
            keys |= {"correction", "correction_max", "correction_min", "old_logprobs"}
        return keys


class AlgorithmConfig(Section):
    """Credit assignment from rewards. A key that the chosen algorithm does not read is an error."""

    name: str = "grpo"
    """`grpo`, `rloo`, `reinforce`, `reinforce++`, `positive`, `greedy`, `best_of_n`,
    `distillation`, or your own as `module:Class` or `file.py:Class`."""
    credit: Literal["attempt", "turn"] = "attempt"
    """`attempt`: every answer is credited with the attempt's reward; `turn`: each with the rewards
    of its turn and of later ones, including those of calls and agents."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward per turn, with `credit` by `turn`."""
    reward_keys: tuple[str, ...] = ()
    """Keys of emitted rewards that are added to the reward."""
    logged_keys: tuple[str, ...] = ()
    """Keys of emitted rewards that are only logged; any other key causes a warning."""
    divide_by_std: bool = False
    """`grpo`: divide by the group's standard deviation, as its paper does."""
    group_baseline: bool = False
    """`reinforce++`: subtract each group's mean before normalizing over the step."""
    baseline_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """`reinforce`: decay of the running mean of rewards, per step."""
    success_threshold: float = 1.0
    """`greedy`: minimum reward of a correct answer."""
    teacher: str | None = None
    """`distillation`: the model to learn from, named like `model`."""
    oversample: Annotated[int, Field(ge=1)] = 1
    """Collect groups of more tasks in place of those without a signal, up to this many times
    `tasks_per_step`."""


class FailureRewardConfig(Section):
    """Rewards of failed rollouts by kind; without one they are retried and then left out."""

    agent: float | None = None
    """Reward of a rollout whose agent raised, with what it sampled before."""
    context_length: float | None = None
    """Reward of a rollout whose prompt outgrew the model's context."""
    timeout: float | None = None
    """Reward of a rollout that ran longer than `runner.timeout_s`."""
    bad_reward: float | None = None
    """Reward of a rollout whose agent returned no finite number."""


class LengthConfig(Section):
    """Truncated answers, and penalties on the length of answers."""

    truncated: Literal["train", "mask", "mask_rollout"] = "train"
    """Answers cut off at `max_tokens` or the end of the context: `train` them like any other,
    `mask` them out of the loss, or `mask_rollout` all answers of their rollout. Their rewards count
    in the baseline of their group either way."""
    soft_limit: Annotated[int, Field(ge=0)] | None = None
    """Tokens of an answer from which its reward is reduced, linearly up to `hard_limit`, as DAPO's
    overlong shaping does."""
    hard_limit: Annotated[int, Field(ge=1)] | None = None
    """Tokens of an answer from which its reward is reduced by all of `penalty`."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """Reduction of the reward at `hard_limit`."""
    token_cost: Annotated[float, Field(ge=0)] = 0.0
    """Reduction of the reward for every sampled token."""

    @property
    def is_active(self) -> bool:
        """Whether rewards depend on the length of answers."""
        return self.hard_limit is not None or self.token_cost > 0

    def compute_cost(self, tokens: int) -> float:
        """Penalty on the reward for an answer of this many tokens."""
        cost = self.token_cost * tokens
        if self.soft_limit is not None and self.hard_limit is not None:
            over = (tokens - self.soft_limit) / (self.hard_limit - self.soft_limit)
            cost += self.penalty * min(1.0, max(0.0, over))
        return cost

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if (self.soft_limit is None) != (self.hard_limit is None):
            raise ValueError("soft_limit and hard_limit must be set together")
        if (self.soft_limit or 0) >= (self.hard_limit or 1):
            raise ValueError(
                f"expected soft_limit below hard_limit, found {self.soft_limit} and "
                f"{self.hard_limit}"
            )
        if self.hard_limit is None and self.penalty != 1.0:
            raise ValueError("penalty needs soft_limit and hard_limit: set both, or use token_cost")
        return self


class CurriculumConfig(Section):
    """Weights of solved and unsolved tasks, judged by the mean reward of their last group."""

    solved_weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Probability with which a solved task is drawn when it is its turn."""
    solved_reward: float = 1.0
    """Minimum mean reward of a solved task."""
    unsolved_weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Probability with which an unsolved task is drawn when it is its turn."""
    unsolved_reward: float = 0.0
    """Maximum mean reward of an unsolved task."""

    @property
    def is_active(self) -> bool:
        """Whether some tasks are drawn less often than others."""
        return self.solved_weight < 1 or self.unsolved_weight < 1

    def weigh(self, reward: float | None) -> float:
        """Return the probability of drawing a task whose last group had this mean reward."""
        if reward is not None and reward >= self.solved_reward:
            return self.solved_weight
        if reward is not None and reward <= self.unsolved_reward:
            return self.unsolved_weight
        return 1.0

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if self.unsolved_reward >= self.solved_reward:
            raise ValueError(
                f"expected unsolved_reward below solved_reward, found {self.unsolved_reward} and "
                f"{self.solved_reward}"
            )
        return self


class LoopConfig(Section):
    """Order of collecting rollouts and training."""

    name: Literal["on_policy", "overlapped"] = "on_policy"
    """`on_policy`: a step's rollouts are sampled by the weights it updates; `overlapped`: rollouts
    of later steps run while a step is trained."""
    max_staleness: Annotated[int, Field(ge=1)] = 1
    """`overlapped`: steps by which the weights that sampled a token may be older than those that it
    trains."""
    mini_batches: Annotated[int, Field(ge=1)] = 1
    """Parts of a step's groups, with an optimizer update on each."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over a step's groups."""

    @model_validator(mode="after")
    def _check_staleness(self) -> Self:
        if self.name == "on_policy" and self.max_staleness != 1:
            raise ValueError(
                "max_staleness has no meaning with loop.name 'on_policy': leave it out"
            )
        return self


class SelectionConfig(Section):
    """Selection of the calls to train; the others stay context. An empty key selects all."""

    agents: tuple[str, ...] = ()
    """Train only calls of these agents, named in the URL or a header; all if absent."""
    models: tuple[str, ...] = ()
    """Train only calls that ask for one of these models; all if absent."""
    system_contains: str = ""
    """Train only conversations whose system prompt contains this text."""
    tools: tuple[str, ...] = ()
    """Train only calls that offer all of these tools."""
    discarded: bool = True
    """Train also answers that the agent discarded: other choices (`n`) and other answers to the
    same prompt than the one it continued. Answers of a last turn never count as discarded."""


class EvaluationConfig(Section):
    """Comparison of models on held-out tasks: before, during and after training, and by
    `whet eval`."""

    greedy: bool = True
    """Run every task of an evaluation once at temperature 0."""
    samples: Annotated[int, Field(ge=0, le=1000)] = 1
    """Sampled rollouts of each task of an evaluation; pass@k is reported for k up to this."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Temperature of the samples."""
    pass_threshold: float = 1.0
    """Minimum reward of a sample that passes, for pass@k."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations during training; 0 evaluates before and after it only. The model
    of a run is then that of its best evaluated step."""
    patience: Annotated[int, Field(ge=0)] = 0
    """Evaluations in a row without a better one after which training stops; 0 never stops it."""

    @model_validator(mode="after")
    def _check_patience(self) -> Self:
        if self.patience and not self.every:
            raise ValueError("patience counts the evaluations of `every`, which is 0: set it too")
        return self


class SupervisedConfig(Section):
    """Imitation of dialogues and preference pairs: `whet sft` and `whet dpo`, which compute `steps`
    from these keys and the data."""

    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the data."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Dialogues or pairs in an optimizer step."""
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Share of the data to hold out, unless held-out data is given."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 20
    """Optimizer steps between checkpoints, each with a line of progress and the held-out loss."""
    skip_long: bool = False
    """Leave out dialogues that do not fit into the model's context; they are an error otherwise."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """`dpo`: weight of the log-ratio to the model before training; higher stays closer to it."""


class CheckpointsConfig(Section):
    """Checkpoints, which are written while the next step runs."""

    every: Annotated[int, Field(ge=1)] = 1
    """Steps between checkpoints; one is left out where writing would take more than a fifth of the
    time. A resumed run repeats the updates since the last one from their stored rollouts."""
    keep: Annotated[int, Field(ge=1)] = 1
    """Newest checkpoints to keep, besides that of the best evaluated step."""


class BudgetConfig(Section):
    """Limits of a run, checked before each step. A run that spent one can be resumed with more."""

    minutes: Annotated[float, Field(gt=0)] | None = None
    """Time of training steps, evaluations between them included; no limit if absent."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens sampled in training rollouts; no limit if absent."""
