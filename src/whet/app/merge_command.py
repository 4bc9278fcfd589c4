"""`whet models merge`: what a run trained, as one model folder."""

import argparse
import sys
from pathlib import Path

import anyio

from whet.app.sources import LocalModel, read_models
from whet.config import TrainerConfig
from whet.durable import whole_folder
from whet.errors import ConfigError, boundary
from whet.policies.local import LocalPolicy
from whet.trainers.local import LocalTrainer


def merge_command(args: argparse.Namespace) -> int:
    """Write the merged model. Raises ConfigError if there is nothing to merge, or no room."""
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"{str(out)!r} is there already: choose another folder")
    [model] = read_models([args.source], None, _say)
    assert isinstance(model, LocalModel)
    anyio.run(_merge, model, out)
    _say(f"{args.source} is merged: {out}")
    return 0


async def _merge(model: LocalModel, out: Path) -> None:
    if model.checkpoint is None and model.adapter is None:
        raise ConfigError(
            f"{model.source!r} has full weights already: use {str(model.folder)!r} as it is"
        )
    trained = model.config.trainer if model.config else TrainerConfig()
    # In fp32, whatever it was trained in: adding an adapter in bf16 would round it away.
    exact = trained.model_copy(update={"precision": "fp32"})
    policy = LocalPolicy(model.folder, exact, device="cpu", seed=0, adapter=model.adapter)
    if model.checkpoint is not None:
        await LocalTrainer(policy).restore(model.checkpoint)
    policy.merge()
    with boundary(ConfigError, f"cannot write {str(out)!r}"), whole_folder(out) as folder:
        policy.write_model(folder)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
