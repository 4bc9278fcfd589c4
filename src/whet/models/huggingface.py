"""A Hugging Face model in this process: one copy of weights for the sampler and the trainer.

In bf16 the weights that are run are rounded copies of what the trainer keeps in fp32; sampler and
trainer run the same ones, so that their log-probabilities differ only by the order of sums.
"""

import logging
import shutil
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch
import torch.utils.checkpoint
from anyio import to_thread
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import torch as safetensors
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from whet.config import LocalTrainerConfig
from whet.errors import ConfigError, EngineError, TrainerError, boundary
from whet.io.files import atomic_file
from whet.models import tree_attention as attention
from whet.models.layers import LMHead, fuse_norms, fuse_rotary

logger = logging.getLogger(__name__)


class FairLock:
    """A lock that its holder cannot take again before a thread that already waits for it.

    The engine releases it only to take it at once for its next pass; with a plain lock a trainer
    would wait until the engine is idle.
    """

    def __init__(self) -> None:
        self._entry = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._entry:
            self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


class LocalPolicy:
    """The model shared by engine and trainer, and the version of its weights.

    The model is never put in training mode: dropout would make the trainer's log-probabilities
    differ from the sampler's. Weights are changed inside `update`; the engine holds `lock` for
    each pass, so that every token is sampled from one version.
    """

    def __init__(
        self,
        folder: Path,
        config: LocalTrainerConfig,
        *,
        device: str,
        seed: int,
        adapter: Path | None = None,
        base: "LocalPolicy | None" = None,
    ) -> None:
        """Load the model in `folder`, for sampling with the LoRA `adapter` if there is one.

        With a `base`, which has no adapter and is not trained, its weights are shared.
        """
        self.folder = folder
        self.config = config
        self.device = torch.device(_pick_device(device))
        self.dtype = _pick_dtype(config.precision, self.device)
        """Precision of forward passes."""
        self.version = 0
        """Number of optimizer steps behind the weights; `restore` may lower it."""
        self.revision = 0
        """Number of times this object's weights changed; never goes back. A KV cache of another
        revision is stale."""
        self.lock = FairLock()
        disable_progress_bar()  # progress is displayed in app/ only
        with boundary(ConfigError, f"cannot load the model in {str(folder)!r}"):
            hf_config = _read_config(folder)
            self.context_length = _read_context_length(hf_config)
            attention.register()
            model = clone_modules(cast(PreTrainedModel, base.model)) if base else self._load()
            self.vocabulary = int(hf_config.vocab_size)
        self.partial_layers = _find_partial_layers(hf_config)
        """Kinds of layers that do not attend to the whole context, such as sliding windows."""
        self.model = cast(nn.Module, model)
        """The model that is run; with LoRA its linear layers are replaced in place."""
        self.wrapped = _with_adapters(model, config, seed, adapter)
        """The model that is saved: the PEFT model, or the model itself for full training."""
        self.model.to(self.device).eval()
        if not config.compile:  # the compiler fuses more than these
            fuse_norms(self.model)
            fuse_rotary(self.model)
        self.body = model.base_model
        """The model without its LM head; returns hidden states."""
        self.packs_rows = True
        """Whether rows that share prefixes are trained as one tree, or else one by one."""
        self._check_rows(hf_config, base)
        self.head = LMHead(cast(nn.Linear, model.get_output_embeddings()), hf_config)
        self._check_head()
        if config.gradient_checkpointing or config.compile:
            _wrap_layers_for_training(self.body, config)
        self._reference: Mapping[str, Tensor] = {}
        """A copy of the weights before training, once `keep_reference` was called."""

    def _load(self) -> PreTrainedModel:
        loaded = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=self.dtype, attn_implementation=attention.NAME
        )
        return cast(PreTrainedModel, loaded)

    @contextmanager
    def update(self, version: int) -> Generator[None]:
        """Context in which weights may be changed; they are of this version afterwards."""
        with self.lock:
            self.revision += 1
            yield
            self.version = version

    def keep_reference(self) -> None:
        """Keep a copy of the trainable weights as they are now, for `use_reference`.

        New adapters need none: without them the model has its initial weights.
        """
        self._reference = {n: p.detach().clone() for n, p in self.get_trainable().items()}

    @contextmanager
    def use_reference(self) -> Generator[None]:
        """Context in which the model has its weights before training; sampling waits meanwhile.

        They are those of `keep_reference`, or with adapters those of the model without them.
        """
        if isinstance(self.wrapped, PeftModel) and not self._reference:
            with self.lock, self.wrapped.disable_adapter():
                yield
            return
        if not self._reference:
            raise TrainerError(
                "loss.kl needs the weights as they were before training, and keep_reference was "
                "not called for this policy"
            )
        with self.lock:
            trained = {name: parameter.data for name, parameter in self.get_trainable().items()}
            try:
                self._swap_in(self._reference)
                yield
            finally:
                self._swap_in(trained)

    def get_trainable(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name."""
        return {n: p for n, p in self.wrapped.named_parameters() if p.requires_grad}

    async def export_weights(self, file: Path) -> str:
        """Write the trainable weights for engines of other processes; returns the file's path."""
        await to_thread.run_sync(self.write_weights, file)
        return str(file)

    def write_weights(self, file: Path) -> None:
        """Write the trainable weights, for a policy in another process. The write is atomic."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as to:
            safetensors.save_file({n: p.detach() for n, p in self.get_trainable().items()}, to)

    def load_weights(self, file: Path, version: int) -> None:
        """Load what `write_weights` wrote, bit for bit.

        Raises:
            EngineError: the file cannot be read or belongs to another model; nothing was changed.
        """
        parameters = self.get_trainable()
        with boundary(EngineError, f"cannot load the weights {str(file)!r}"):
            weights = safetensors.load_file(file)
        if {n: w.shape for n, w in weights.items()} != {n: p.shape for n, p in parameters.items()}:
            raise EngineError(
                f"the weights {str(file)!r} belong to another model or were written with other "
                "settings"
            )
        with self.update(version), torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])

    def write_model(self, folder: Path) -> None:
        """Write a PEFT adapter folder, or with full weights a Hugging Face model folder."""
        with self.lock:
            if isinstance(self.wrapped, PeftModel):
                # Without the base weights of an adapted head, which PEFT would add by itself.
                self.wrapped.save_pretrained(str(folder), save_embedding_layers=False)
            else:
                self.wrapped.save_pretrained(str(folder))
        for file in self.folder.iterdir():
            if file.name.startswith(("tokenizer", "chat_template", "additional_chat", "special")):
                copy = shutil.copytree if file.is_dir() else shutil.copy2
                copy(file, folder / file.name)

    def merge(self) -> None:
        """Merge the LoRA adapter into the weights it adapts."""
        if isinstance(self.wrapped, PeftModel):
            with self.update(self.version):
                _untie_head(cast(PreTrainedModel, self.wrapped.get_base_model()))
                merged = self.wrapped.merge_and_unload()
                self.wrapped = cast(PreTrainedModel, merged)

    def choose_micro_batch_tokens(self) -> int:
        """Default number of tokens of a training pass, from the device's memory."""
        if self.device.type == "cpu":
            return 2048
        kept = count_saved_numbers(
            self.wrapped.config, checkpointing=self.config.gradient_checkpointing
        )
        _, total = torch.cuda.mem_get_info(self.device)
        tokens = total // (2 * kept * self.dtype.itemsize)
        return max(2048, min(65_536, tokens))

    def _swap_in(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.get_trainable().items():
            parameter.data = weights[name]

    def _check_head(self) -> None:
        """Check that `head` of `body`, which the trainer runs, gives the model's logits."""
        ids_1T = torch.tensor([[0, 1]], device=self.device)
        with torch.inference_mode():
            whole = self.model(input_ids=ids_1T, use_cache=False).logits
            parts = self.head(self.body(input_ids=ids_1T, use_cache=False).last_hidden_state)
        if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-4):
            raise ConfigError(
                f"the model in {str(self.folder)!r} post-processes its logits in a way the local "
                "trainer does not support"
            )

    def _check_rows(self, config: PretrainedConfig, base: "LocalPolicy | None") -> None:
        """Find out how rows of this model can be trained, by tiny passes, unless a base did so.

        Raises:
            ConfigError: what a token's position means depends on how long its row gets.
        """
        if base is not None:
            self.packs_rows, self.context_length = base.packs_rows, base.context_length
            return
        model = cast(PreTrainedModel, self.model)
        with self.lock, boundary(ConfigError, f"cannot run the model in {str(self.folder)!r}"):
            probe = attention.RowProbe(model, self.body, self.vocabulary)
            exact = self.dtype == torch.float32
            tolerance = 1e-3 if exact else max(0.1, 3 * probe.measure_rounding_gap())
            self.packs_rows = not self.partial_layers and probe.measure_tree_gap() < tolerance
            if not self.packs_rows:
                logger.warning("the layers of %r are trained row by row", config.model_type)
                if probe.measure_row_gap() > tolerance:  # the attention has more than sdpa computes
                    model.set_attn_implementation("eager")
            lengths = [self.context_length, *_find_original_lengths(config.to_dict())]
            stable = [n for n in lengths if probe.measure_length_gap(n) < tolerance]
        if not stable:
            raise ConfigError(
                f"the model in {str(self.folder)!r} encodes positions by the length of the whole "
                "row: tokens sampled in a short row cannot be trained in a longer one"
            )
        if stable[0] < self.context_length:
            self.context_length = stable[0]
            logger.warning(
                "%r encodes positions differently beyond %d tokens: the context is limited to them",
                config.model_type,
                stable[0],
            )


def load_base(folder: Path, config: LocalTrainerConfig, *, device: str) -> LocalPolicy:
    """Load a model that is not trained itself: the base of adapters that share its weights."""
    plain = {"weights": "full", "gradient_checkpointing": False, "compile": False}
    policy = LocalPolicy(folder, config.model_copy(update=plain), device=device, seed=0)
    for parameter in policy.model.parameters():
        parameter.requires_grad_(False)
    return policy


def clone_modules(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules around the same parameters, so that modules can be replaced."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return deepcopy(model, shared)


_GLOBAL_STATE = threading.Lock()
"""The CPU's random generator and the filters of warnings belong to the whole process."""


def _with_adapters(
    model: PreTrainedModel, config: LocalTrainerConfig, seed: int, adapter: Path | None
) -> PreTrainedModel | PeftModel:
    if adapter is not None:
        return _with_adapter(model, adapter)
    return _with_lora(model, config, seed) if config.weights == "lora" else model


def _with_lora(model: PreTrainedModel, config: LocalTrainerConfig, seed: int) -> PeftModel:
    experts = find_experts(model)
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=_choose_modules(model, config.lora_layers, bool(experts)),
        target_parameters=experts if "mlp" in config.lora_layers else None,
        task_type="CAUSAL_LM",
    )
    with (
        _GLOBAL_STATE,
        boundary(ConfigError, f"trainer.lora_layers {config.lora_layers} do not fit the model"),
        torch.random.fork_rng(devices=[]),
        _silence_peft(),
    ):
        torch.manual_seed(seed)
        return get_peft_model(model, lora, autocast_adapter_dtype=False)


def find_experts(model: nn.Module) -> list[str]:
    """Names of the weights of a mixture of experts, each of which holds all experts of a layer."""
    return [name for name, weight in model.named_parameters() if weight.ndim == 3]


def _choose_modules(
    model: PreTrainedModel, layers: Sequence[str], has_experts: bool
) -> str | list[str]:
    # With experts "all-linear" has an adapter on the router, which changes the experts of a token.
    if set(layers) == {"attention", "mlp"} and not has_experts:
        return "all-linear"
    head = cast(nn.Module, model.get_output_embeddings())
    modules = cast(Iterable[tuple[str, nn.Module]], model.named_modules())
    linear = [(name, m is head) for name, m in modules if isinstance(m, nn.Linear | Conv1D)]
    return [name for name, is_head in linear if _name_kind(name, is_head) in layers]


ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of linear layers that choose experts."""


def _name_kind(name: str, is_head: bool) -> str:
    if is_head:
        return "head"
    if name.rpartition(".")[2] in ROUTERS:
        return "router"
    return "attention" if "attn" in name or "attention" in name else "mlp"


def find_layers(module: nn.Module) -> list[nn.Module]:
    """The transformer blocks inside a module, whatever it calls them."""
    if isinstance(module, GradientCheckpointingLayer):
        return [module]
    return [layer for child in module.children() for layer in find_layers(child)]


def count_saved_numbers(config: PretrainedConfig, *, checkpointing: bool) -> int:
    """Numbers that the layers save per token for the backward pass, as measured."""
    text = config.get_text_config()
    hidden, layers = cast(int, text.hidden_size), cast(int, text.num_hidden_layers)
    if checkpointing:
        return layers * hidden
    width: object = getattr(text, "intermediate_size", None)
    if not isinstance(width, int):  # by another name, or each layer or expert has its own
        width = 4 * hidden
    return layers * (10 * hidden + 5 * width)


def _wrap_layers_for_training(body: nn.Module, config: LocalTrainerConfig) -> None:
    """Compile or checkpoint each layer in passes with a gradient.

    Not by transformers' own switches: they need training mode and disable the sampler's KV cache.
    """
    layers = find_layers(body)
    if not layers:
        raise ConfigError(
            "trainer.gradient_checkpointing and trainer.compile do not support "
            f"{type(body).__name__}, whose layers transformers does not mark: leave them out"
        )
    for layer in layers:
        plain = trained = cast(Callable[..., Tensor], layer.forward)
        if config.compile:
            trained = torch.compile(trained, dynamic=True)
        if config.gradient_checkpointing:
            trained = partial(_run_checkpointed, trained)
        layer.forward = partial(_dispatch, plain, trained)


def _dispatch(
    plain: Callable[..., Tensor], trained: Callable[..., Tensor], *args: object, **settings: object
) -> Tensor:
    return (trained if torch.is_grad_enabled() else plain)(*args, **settings)


def _run_checkpointed(forward: Callable[..., Tensor], *args: object, **settings: object) -> Tensor:
    checkpoint = cast(Callable[..., Tensor], torch.utils.checkpoint.checkpoint)
    return checkpoint(
        partial(forward, **settings), *args, use_reentrant=False, preserve_rng_state=False
    )


def _pick_dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        precision = "fp32" if device.type == "cpu" else "bf16"
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _with_adapter(model: PreTrainedModel, adapter: Path) -> PeftModel:
    # Not merged: the arithmetic stays that of the run which trained it.
    with (
        _GLOBAL_STATE,
        boundary(ConfigError, f"the adapter {str(adapter)!r} does not fit the model"),
        _silence_peft(),
    ):
        return PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)


@contextmanager
def _silence_peft() -> Generator[None]:
    """Silence warnings of PEFT about what is intended."""
    with warnings.catch_warnings():
        # An adapter is on the head only; the embedding it may be tied to stays.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        # PEFT finds out by itself which way round the weights of GPT-2's layers are.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        yield


def _untie_head(model: PreTrainedModel) -> None:
    """Give a head with an adapter weights of its own: merging must not change the embeddings."""
    head = cast(nn.Module, model.get_output_embeddings())
    plain, embeddings = getattr(head, "base_layer", None), model.get_input_embeddings()
    if plain is not None and plain.weight is cast(nn.Embedding, embeddings).weight:
        plain.weight = nn.Parameter(plain.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def _pick_device(device: str) -> Literal["cpu", "cuda"]:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is 'cuda' but torch finds no GPU: use 'cpu' or 'auto'")
    return "cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda"


def _read_config(folder: Path) -> PretrainedConfig:
    """The config of a model's text part: of a composite one, such as for images, or all of it."""
    config = cast(PretrainedConfig, AutoConfig.from_pretrained(folder))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"the model in {str(folder)!r} has model_type {config.model_type!r}: expected one that "
            "transformers loads as a causal language model"
        )
    return config.get_text_config()


def _read_context_length(config: PretrainedConfig) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ConfigError(
            f"the config of a model with model_type {config.model_type!r} lacks "
            "max_position_embeddings, by which its context is limited: add it to config.json"
        )
    return length


def _find_partial_layers(config: PretrainedConfig) -> tuple[str, ...]:
    """Kinds of layers other than full attention, by the model's config."""
    settings = config.to_dict()
    plain = "sliding_attention" if settings.get("sliding_window") else "full_attention"
    kinds = set(settings.get("layer_types") or [plain])
    return tuple(sorted(kinds - {"full_attention"}))


def _find_original_lengths(settings: Mapping[str, object]) -> Iterable[int]:
    """Context lengths before an extension by scaled positions, anywhere in a config."""
    for key, value in settings.items():
        if key == "original_max_position_embeddings" and isinstance(value, int):
            yield value
        elif isinstance(value, dict):
            yield from _find_original_lengths(cast(dict[str, object], value))
