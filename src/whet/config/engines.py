"""Sections of sampling and training back ends, one for each `kind`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from whet.config.section import Section, changed_keys


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
    """Running servers, all with the same model and flags; if absent, they are started."""
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
                "command, flags and replicas are for servers that are started, not for urls"
            )
        if (self.replicas or 1) > 1 and any(flag.startswith("--port") for flag in self.flags):
            raise ValueError("replicas have ports of their own: leave out --port")
        return self


class SGLangConfig(_EngineSection):
    """Sample from running SGLang servers."""

    kind: Literal["sglang"] = "sglang"
    urls: tuple[str, ...] = ()
    """Running servers, all with the same model and flags; required with `sglang`."""

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        if not self.urls:
            raise ValueError("name the SGLang servers with urls: only 'vllm' is started")
        return self


Layer = Literal["attention", "mlp", "head"]


SHARDLESS_KEYS = {"compile", "optimizer"}
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
    and on a GPU what fills about half of it. Halved when memory runs out."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, for a fraction of the memory."""
    gpus: Annotated[int, Field(ge=1)] = 1
    """GPUs of this machine to train on, with a process each; without a GPU, processes. Rows are
    dealt by tokens; the first GPU samples too."""
    shard: Literal["auto", "yes", "no"] = "auto"
    """With `gpus`: divide the trained model, its gradient and its optimizer among them (FSDP2), or
    have a copy on each; `auto` divides what would fill more than half of a GPU."""
    compile: bool = False
    """Compile the layers for training: up to a minute at the first step, then faster; for a GPU and
    long runs."""

    @model_validator(mode="after")
    def _check_shard(self) -> Self:
        if self.shard != "yes":
            return self
        if self.gpus == 1:
            raise ValueError("shard divides the model among several GPUs: set gpus too")
        if odd := changed_keys(self) & SHARDLESS_KEYS:
            raise ValueError(f"a sharded model has no {min(odd)}: leave it out, or set shard to no")
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
