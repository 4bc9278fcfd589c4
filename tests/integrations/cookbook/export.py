"""Run with the Python of tinker-cookbook: train adapters, download them, merge them, compare.

Writes what it found as JSON. The arguments are the model's folder, which the server serves under
the name `tiny`, and a folder to write to.
"""

import json
import sys
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types
from tinker_cookbook import weights
from tinker_cookbook.exceptions import WeightsMergeError
from transformers import AutoModelForCausalLM

TOKENS = [5, 17, 42, 99, 7, 300]


def compare(model: str, out: Path, *, unembed: bool) -> dict[str, Any]:
    """Train, save, download and merge; the difference of the merged model to the server."""
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(
        base_model="tiny", rank=4, seed=1, train_unembed=unembed
    )
    inputs: dict[str, Any] = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
    data = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    for _ in range(4):
        training.forward_backward([data], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = training.save_state("trained").result().path
    sampler = service.create_sampling_client(model_path=path)
    served = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:]
    adapter = weights.download(tinker_path=path, output_dir=str(out / "adapter"))
    files = sorted(file.name for file in Path(adapter).iterdir())
    left = tinker.RestClient().list_user_checkpoints(limit=500).result().checkpoints
    found: dict[str, Any] = {
        "tokens": TOKENS,
        "served": served,
        "files": files,
        "exports_left": [one.tinker_path for one in left if one.checkpoint_type == "external"],
    }
    weights.build_lora_adapter(
        base_model=model, adapter_path=adapter, output_path=str(out / "peft")
    )
    try:
        weights.build_hf_model(
            base_model=model, adapter_path=adapter, output_path=str(out / "merged")
        )
    except WeightsMergeError as error:
        return {**found, "error": str(error)}
    merged = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    ids = torch.tensor([TOKENS])
    with torch.inference_mode():
        logprobs = merged(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    gap = (logprobs - torch.tensor(served)).abs().max().item()
    return {**found, "gap": gap}


if __name__ == "__main__":
    folder, out = sys.argv[1], Path(sys.argv[2])
    results = [compare(folder, out / str(unembed), unembed=unembed) for unembed in (False, True)]
    sys.stdout.write(json.dumps(results) + "\n")
