"""A Hugging Face model in this process: one copy of weights for the sampler and the trainer.

In bf16 the weights that are run are rounded copies of what the trainer keeps in fp32; sampler and
trainer run the same ones, so that their log-probabilities differ only by the order of sums.
"""

import shutil
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, cast

import torch
import torch.utils.checkpoint
from anyio import to_thread
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import torch as safetensors
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from whet.config import TrainerConfig
from whet.durable import whole_file
from whet.errors import ConfigError, EngineError, TrainerError, boundary
from whet.policies import attention
from whet.policies.head import Head
from whet.policies.norms import fuse_norms
from whet.policies.rotary import fuse_rotary


class TurnLock:
    """A lock whose holder cannot take it again before whoever waits for it.

    The engine lets go only to take it at once for its next pass; with a plain lock a trainer
    would wait until the engine has nothing to do.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._turn:
            self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


class LocalPolicy:
    """The weights and their version.

    The model is never put in training mode: dropout would make the trainer's log-probabilities
    differ from the sampler's. Weights are changed inside `changing`; the engine holds `lock` for
    each pass, so a token is always of one version.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainerConfig,
        *,
        device: str,
        seed: int,
        adapter: Path | None = None,
        base: "LocalPolicy | None" = None,
    ) -> None:
        """With an `adapter` the weights are those of the folder under it, to be sampled from.

        With a `base`, which has no adapter and is not trained, its weights are used once more.
        """
        self.folder = folder
        self.config = config
        self.device = torch.device(_pick_device(device))
        self.dtype = _pick_dtype(config.precision, self.device)
        """Of what is run."""
        self.version = 0
        self.edition = 0
        """How often the weights were changed: keys and values of another edition are stale.
        Unlike the version it never goes back, whatever is restored."""
        self.lock = TurnLock()
        disable_progress_bar()  # a library draws none; whoever shows progress does it in app/
        with boundary(ConfigError, f"cannot load the model in {str(folder)!r}"):
            hf_config = cast(PretrainedConfig, AutoConfig.from_pretrained(folder))
            _refuse_partial_attention(hf_config)
            attention.register()
            model = twin(cast(PreTrainedModel, base.model)) if base else self._load()
        self.context_length = int(hf_config.max_position_embeddings)
        self.vocabulary = int(hf_config.vocab_size)
        self.model = cast(nn.Module, model)
        """What is run: with LoRA, its linear layers are replaced in place."""
        self.wrapped: PreTrainedModel | PeftModel = model
        """What is saved: the PEFT model, or the model itself when all weights are trained."""
        if adapter is not None:
            self.wrapped = _with_adapter(model, adapter)
        elif config.weights == "lora":
            self.wrapped = _with_lora(model, config, seed)
        self.model.to(self.device).eval()
        if not config.compile:  # the compiler fuses more than that
            fuse_norms(self.model)
            fuse_rotary(self.model)
        self.body = model.base_model
        """All but the head: gives hidden states."""
        self.head = Head(cast(nn.Linear, model.get_output_embeddings()), hf_config)
        self._refuse_other_heads()
        if config.gradient_checkpointing or config.compile:
            _train_layers_otherwise(self.body, config)
        self._base: Mapping[str, Tensor] = {}
        """The weights as they were loaded, where that was asked for."""
        if config.keep_reference and config.weights == "full":
            self._base = {n: p.detach().clone() for n, p in self.trainable().items()}

    def _load(self) -> PreTrainedModel:
        loaded = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=self.dtype, attn_implementation=attention.NAME
        )
        return cast(PreTrainedModel, loaded)

    @contextmanager
    def changing(self, version: int) -> Generator[None]:
        """Change the weights inside; they are of this version afterwards."""
        with self.lock:
            self.edition += 1
            yield
            self.version = version

    @contextmanager
    def reference(self) -> Generator[None]:
        """The model as it was before training, inside; nobody samples meanwhile.

        With LoRA the adapter is left out, and no second copy is needed.
        """
        if isinstance(self.wrapped, PeftModel):
            with self.lock, self.wrapped.disable_adapter():
                yield
            return
        if not self._base:
            raise TrainerError(
                "loss.kl needs the weights as they were before training: set "
                "trainer.keep_reference to keep a copy, or trainer.weights to 'lora'"
            )
        with self.lock:
            trained = {name: parameter.data for name, parameter in self.trainable().items()}
            try:
                self._put(self._base)
                yield
            finally:
                self._put(trained)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The weights training changes, by name."""
        return {n: p for n, p in self.wrapped.named_parameters() if p.requires_grad}

    async def hand_over(self, file: Path) -> str:
        """Write what training changes; engines elsewhere load the file."""
        await to_thread.run_sync(self.write_weights, file)
        return str(file)

    def write_weights(self, file: Path) -> None:
        """What training changes, for a policy in another process. Appears whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as to:
            safetensors.save_file({n: p.detach() for n, p in self.trainable().items()}, to)

    def load_weights(self, file: Path, version: int) -> None:
        """Take over what `write_weights` wrote; bit for bit, so both give the same numbers.

        Raises:
            EngineError: it cannot be read, or is of another model; nothing was changed.
        """
        parameters = self.trainable()
        with boundary(EngineError, f"cannot load the weights {str(file)!r}"):
            weights = safetensors.load_file(file)
        if {n: w.shape for n, w in weights.items()} != {n: p.shape for n, p in parameters.items()}:
            raise EngineError(f"the weights {str(file)!r} are of another model or other settings")
        with self.changing(version), torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])

    def write_model(self, folder: Path) -> None:
        """An ordinary PEFT adapter folder, or with full weights a Hugging Face model folder."""
        with self.lock:
            self.wrapped.save_pretrained(str(folder))
        for file in self.folder.iterdir():
            if file.name.startswith(("tokenizer", "chat_template", "additional_chat", "special")):
                copy = shutil.copytree if file.is_dir() else shutil.copy2
                copy(file, folder / file.name)

    def merge(self) -> None:
        """Put the adapter into the weights it adapts: from now on there are only those."""
        if isinstance(self.wrapped, PeftModel):
            with self.changing(self.version):
                merged = self.wrapped.merge_and_unload()  # pyright: ignore[reportCallIssue]  # peft gives its own models no type
                self.wrapped = cast(PreTrainedModel, merged)

    def micro_batch_tokens(self) -> int:
        """Tokens that a training pass may have, where the config does not say."""
        if self.device.type == "cpu":
            return 2048
        config = cast(dict[str, int], self.wrapped.config.to_dict())
        # What a layer keeps of a token for the backward pass, by measurement.
        kept = 10 * config["hidden_size"] + 5 * config["intermediate_size"]
        if self.config.gradient_checkpointing:
            kept = config["hidden_size"]
        _, total = torch.cuda.mem_get_info(self.device)
        tokens = total // (2 * kept * config["num_hidden_layers"] * self.dtype.itemsize)
        return max(2048, min(65_536, tokens))

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.trainable().items():
            parameter.data = weights[name]

    def _refuse_other_heads(self) -> None:
        """The trainer scores tokens by `head` of `body`; that must be what the model says."""
        ids_1T = torch.tensor([[0, 1]], device=self.device)
        with torch.inference_mode():
            whole = self.model(input_ids=ids_1T, use_cache=False).logits
            parts = self.head(self.body(input_ids=ids_1T, use_cache=False).last_hidden_state)
        if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-4):
            raise ConfigError(
                f"the model in {str(self.folder)!r} changes its logits in a way this trainer does "
                "not know; it cannot be trained here"
            )


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same parameters in other modules, which may then be changed."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return deepcopy(model, shared)


_SEEDING = threading.Lock()
"""The CPU's random numbers and the filters of warnings are of the whole process."""


def _with_lora(model: PreTrainedModel, config: TrainerConfig, seed: int) -> PeftModel:
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=_adapted(model, config.lora_layers),
        task_type="CAUSAL_LM",
    )
    with _SEEDING, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Only the head has the adapter; the embedding it may share its weights with stays as it is.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        torch.manual_seed(seed)
        return get_peft_model(model, lora, autocast_adapter_dtype=False)


def _adapted(model: PreTrainedModel, layers: Sequence[str]) -> str | list[str]:
    if set(layers) == {"attention", "mlp"}:
        return "all-linear"
    head = cast(nn.Module, model.get_output_embeddings())
    modules = cast(Iterable[tuple[str, nn.Module]], model.named_modules())
    kinds = {name: _kind(name, m is head) for name, m in modules if isinstance(m, nn.Linear)}
    return [name for name, kind in kinds.items() if kind in layers]


def _kind(name: str, is_head: bool) -> str:
    if is_head:
        return "head"
    return "attention" if "attn" in name or "attention" in name else "mlp"


def _train_layers_otherwise(body: nn.Module, config: TrainerConfig) -> None:
    """Have passes that are trained run each layer compiled, or twice to keep less of it.

    Not by transformers' own switches: they need training mode and take the sampler's cache away.
    """
    for layer in cast(nn.ModuleList, body.layers):
        plain = trained = cast(Callable[..., Tensor], layer.forward)
        if config.compile:
            trained = torch.compile(trained, dynamic=True)
        if config.gradient_checkpointing:
            trained = partial(_recomputed, trained)
        layer.forward = partial(_by_mode, plain, trained)


def _by_mode(
    plain: Callable[..., Tensor], trained: Callable[..., Tensor], *args: object, **settings: object
) -> Tensor:
    return (trained if torch.is_grad_enabled() else plain)(*args, **settings)


def _recomputed(forward: Callable[..., Tensor], *args: object, **settings: object) -> Tensor:
    twice = cast(Callable[..., Tensor], torch.utils.checkpoint.checkpoint)
    whole = partial(forward, **settings)
    return twice(whole, *args, use_reentrant=False, preserve_rng_state=False)


def _pick_dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        precision = "fp32" if device.type == "cpu" else "bf16"
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _with_adapter(model: PreTrainedModel, adapter: Path) -> PeftModel:
    # Not merged: the arithmetic stays that of the run which trained it.
    with boundary(ConfigError, f"the adapter {str(adapter)!r} does not fit the model"):
        return PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)


def _pick_device(device: str) -> Literal["cpu", "cuda"]:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is 'cuda' but torch finds no GPU: use 'cpu' or 'auto'")
    return "cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda"


def _refuse_partial_attention(config: PretrainedConfig) -> None:
    """Slots of keys and values stand for whole contexts; other kinds of memory need other code."""
    settings = config.to_dict()
    plain = "sliding_attention" if settings.get("sliding_window") else "full_attention"
    kinds = set(settings.get("layer_types") or [plain])
    if kinds - {"full_attention"}:
        raise ConfigError(
            f"the local engine serves models with full attention in every layer; "
            f"{config.model_type!r} has {', '.join(sorted(kinds))}"
        )
