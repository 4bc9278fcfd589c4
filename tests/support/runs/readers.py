"""Readers of what trackers wrote, with the libraries it was written for."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32768


@dataclass
class Written:
    """Numbers by step, the config, and the result."""

    steps: list[tuple[int, dict[str, float]]] = field(default_factory=list[Any])
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    result: dict[str, float] = field(default_factory=dict[str, float])


def read_jsonl(folder: Path) -> Written:
    written = Written()
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        kind = line.pop("kind")
        assert line.pop("at") > 0
        if kind == "config":
            assert not written.config
            written.config = line["config"]
        elif kind == "step":
            written.steps.append((line.pop("step"), line))
        else:
            assert not written.result
            written.result = line
    return written


def read_tensorboard(folder: Path) -> Written:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    steps: dict[int, dict[str, float]] = {}
    written = Written()
    tags: Any = found.Tags()
    for tag in tags["scalars"]:
        for event in found.Scalars(tag):
            if tag.startswith("result/"):
                written.result[tag.removeprefix("result/")] = event.value
            else:
                values = steps.setdefault(event.step, {})
                assert tag not in values, "told twice"
                values[tag] = event.value
    [config] = found.Tensors("config")
    written.config = json.loads(config.tensor_proto.string_val[0].decode())
    written.steps = sorted(steps.items())
    return written


def read_wandb(folder: Path) -> Written:
    from wandb.proto import wandb_internal_pb2

    written = Written()
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1, "one run of W&B, whatever process wrote it"
    for data in (data for file in files for data in wandb_records(file)):
        record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]  # made at import
        record.ParseFromString(data)
        match record.WhichOneof("record_type"):
            case "history":
                items = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                own = {key: value for key, value in items.items() if not key.startswith("_")}
                written.steps.append((items["_step"], own))
            case "run":
                for item in record.run.config.update:
                    key = item.key or "/".join(item.nested_key)
                    written.config[key] = json.loads(item.value_json)
            case "summary":
                for item in record.summary.update:
                    key = item.key or "/".join(item.nested_key)
                    if key.startswith("result/"):
                        written.result[key.removeprefix("result/")] = json.loads(item.value_json)
            case _:
                pass
    return written


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of a W&B file, which is a LevelDB log behind seven bytes."""
    data = file.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at < len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part = data[at + 7 : at + 7 + length]
        at += 7 + length
        parts += part
        if kind in (1, 4):
            yield parts
            parts = b""


def read_mlflow(folder: Path) -> Written:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent.parent / 'mlflow.db'}")
    [experiment] = client.search_experiments(filter_string="name = 'whet'")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == folder.name
    written = Written(config=run.data.params)
    steps: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            if name.startswith("result/"):
                written.result[name.removeprefix("result/")] = metric.value
            else:
                values = steps.setdefault(metric.step, {})
                assert name not in values, "told twice"
                values[name] = metric.value
    written.steps = sorted(steps.items())
    if written.result:
        assert run.info.status == "FINISHED"
    return written
