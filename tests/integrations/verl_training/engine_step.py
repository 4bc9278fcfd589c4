"""Train verl's FSDP2 engine on rows of a file. Started by a test in a process of its own.

verl registers its engine for GPUs alone: platform and registration for a CPU are the test's. With
WHET_VERL_DEVICE=cuda neither is used.
"""

import contextlib
import functools
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ.setdefault("WHET_VERL_DEVICE", "cpu")
os.environ.update(
    {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "engine_step"}
    if os.environ["WHET_VERL_DEVICE"] == "cpu"
    else {},
    TORCH_COMPILE_DISABLE="1",
    RANK="0",
    WORLD_SIZE="1",
    LOCAL_RANK="0",
    MASTER_ADDR="127.0.0.1",
)
sys.path.insert(0, str(Path(__file__).parent))

import torch

DEVICE = os.environ["WHET_VERL_DEVICE"]

if __name__ != "__main__":  # verl imports this module as its plugin
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    class CPUModule(types.ModuleType):
        """Stands for `torch.cuda`: what has no meaning on a CPU does nothing."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if hasattr(torch.cpu, name):
                return getattr(torch.cpu, name)
            if "memory" in name or name == "device_count":
                return lambda *a, **k: 0
            if name == "mem_get_info":
                return lambda *a, **k: (1 << 33, 1 << 33)
            if name in ("get_rng_state", "set_rng_state"):
                return getattr(torch, name)
            return lambda *a, **k: None

    class CPUPlatform(PlatformBase):
        """A CPU as verl's device."""

        device_name = property(lambda self: "cpu")
        vendor_name = property(lambda self: "cpu")
        device_module = property(lambda self: CPUModule("torch_cpu"))

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CPU_VISIBLE_DEVICES"

        def ray_resource_name(self) -> str:
            return "CPU"

        def ray_resource_options(self, n: int) -> dict[str, int]:
            return {"num_cpus": n}

        def ray_noset_envvars(self) -> list[str]:
            return []

        def get_device_capability(self, index: int = 0) -> tuple[None, None]:
            return (None, None)

        def is_ipc_supported(self) -> bool:
            return False

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        @contextlib.contextmanager
        def nvtx_range(self, message: str) -> Any:
            yield

        def _nothing(self, *args: Any) -> None: ...

        set_device = synchronize = empty_cache = set_allocator_settings = _nothing
        profiler_start = profiler_stop = cudart = _nothing

    PlatformRegistry.register(platform="cpu")(CPUPlatform)


def nested(rows: list[list[Any]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    values = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def build_engine() -> Any:
    """verl's FSDP2 engine of the tiny model, in fp32."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from whet.models.catalog import TINY

    if DEVICE == "cpu":
        register = EngineRegistry.register(
            model_type="language_model", backend=["fsdp2"], device=["cpu"]
        )
        register(FSDPEngineWithLMHead)
    model = HFModelConfig(
        path=str(TINY),
        use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
        enable_gradient_checkpointing=False,
    )
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=model,
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            fsdp_size=1,
            use_torch_compile=False,
            forward_only=False,
            dtype="float32",
            model_dtype="fp32",
            mixed_precision=precision,
        ),
        # Small steps: Adam moves every weight by the rate, however small the advantages are.
        optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=100),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def build_batch(rows: dict[str, Any]) -> Any:
    from verl.utils import tensordict_utils as tu

    inputs = [p + r for p, r in zip(rows["prompts"], rows["responses"], strict=True)]
    return tu.get_tensordict(
        {
            "input_ids": nested(inputs),
            "position_ids": nested([list(range(len(row))) for row in inputs]),
            "prompts": nested(rows["prompts"]),
            "responses": nested(rows["responses"]),
            "response_mask": nested(rows["response_mask"]),
            "loss_mask": nested(rows["response_mask"]),
            "old_log_probs": nested(rows["rollout_log_probs"], torch.float32),
            "advantages": nested(rows["advantages"], torch.float32),
        },
        non_tensor_dict={
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 4,
            "temperature": 1.0,
            "calculate_entropy": True,
            "global_batch_size": len(inputs),
            "use_fused_kernels": False,
            "pad_mode": "no_padding",
            "compute_loss": True,
            "max_token_len_per_gpu": 4096,
            "num_mini_batch": 1,
        },
    )


def main(folder: Path) -> None:
    from torch import distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # pyright: ignore[reportPrivateImportUsage]
    os.environ["MASTER_PORT"] = str(store.port)
    backend = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    rows = json.loads((folder / "rows.json").read_text())
    engine, batch = build_engine(), build_batch(rows)
    actor = FSDPActorConfig(
        strategy="fsdp2",
        ppo_micro_batch_size_per_gpu=4,
        ppo_mini_batch_size=4,
        rollout_n=1,
        use_kl_loss=False,
        entropy_coeff=0.0,
        loss_agg_mode="seq-mean-token-mean",
        policy_loss={"loss_mode": "whet_rollout"},
    )
    with engine.eval_mode():
        scored = batch.clone()
        tu.assign_non_tensor_data(scored, "compute_loss", False)
        logprobs = engine.infer_batch(scored)["model_output"]["log_probs"].unbind()
    difference = 0.0
    for place, prompt in enumerate(rows["prompts"]):
        # verl's log-probability at a position is that of the next token.
        found = logprobs[place][len(prompt) - 1 : -1].cpu()
        mask = torch.tensor(rows["response_mask"][place], dtype=torch.bool)
        gap = (found - torch.tensor(rows["rollout_log_probs"][place]))[mask].abs().max()
        difference = max(difference, float(gap))
    before = {name: value.clone() for name, value in parameters(engine).items()}
    losses: list[float] = []
    for _ in range(3):
        with engine.train_mode():
            output = engine.train_batch(
                batch.clone(), loss_function=functools.partial(ppo_loss, config=actor)
            )
        loss = output["loss"]
        losses.append(float(sum(loss) if isinstance(loss, list) else loss))
    after = parameters(engine)
    change = max(float((after[name] - before[name]).abs().max()) for name in before)
    where = f"{next(iter(after.values())).device.type}, {dist.get_backend()}"
    result = {"logprob_difference": difference, "losses": losses, "change": change, "place": where}
    sys.stdout.write(json.dumps(result) + "\n")


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    found = engine.get_per_tensor_param()
    found = found[0] if isinstance(found, tuple) else found
    return {name: value.detach().clone() for name, value in found}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
