"""A running verl on a CPU: Ray, TransferQueue, a trainer's controller, and whet's manager."""

import asyncio
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.app.run_folder import RunFolder
from whet.config import resolve
from whet.store.sqlite import SQLiteStore

TESTS = Path(__file__).parents[2]
VERSION = 7
"""verl's global step in these tests."""


def make_config(folder: Path, **trainer: Any) -> Any:
    """verl's config of a run of the tiny model, made as `whet train --trainer verl` makes it."""
    from whet.app.verl.train import write_settings
    from whet.trainers.verl.hydra_config import compose_config
    from whet.trainers.verl.ppo_trainer import check_config

    settings = {"kind": "verl", "preset": "tiny", **trainer}
    config = resolve(
        {
            "dir": str(folder),
            "name": "r",
            "trainer": settings,
            "tasks_per_step": 3,
            "group_size": 4,
            "runner": {"max_attempts": 3, "lease_s": 3},
        }
    )
    run = RunFolder(folder / "runs" / "r")
    if not run.config_file.exists():
        run = RunFolder.create(config, "train")
    written = write_settings(config, run, ["a"], [])
    composed = compose_config(json.loads(written.read_text()))
    check_config(composed)
    return composed


class Verl:
    """A running verl: the store that it shares with runners, and the trainer's controller."""

    def __init__(self, folder: Path, store: SQLiteStore, url: str) -> None:
        import transfer_queue as tq
        from omegaconf import open_dict
        from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

        from integrations.verl_training.parts import TinyClient
        from whet.app.verl.manager import Manager
        from whet.models.catalog import TINY

        self.folder = folder
        self.store = store
        self.url = url
        self.config = make_config(folder)
        with open_dict(self.config):
            self.config.whet.store = url
            self.config.whet.run = "default"
            self.config.whet.token_folder = str(folder)
            self.config.whet.cpus = 0.1
        tq.init(self.config.transfer_queue)
        # The controller alone: its workers and servers need GPUs.
        self.trainer: Any = PPOTrainerSync(self.config)
        self.trainer.global_steps = VERSION
        self.trainer.agent_loop_manager = Manager.create(
            config=self.config, llm_client=TinyClient(str(TINY), VERSION)
        )
        self._runners: list[subprocess.Popen[bytes]] = []

    @property
    def manager(self) -> Any:
        return self.trainer.agent_loop_manager

    def start_runner(self) -> subprocess.Popen[bytes]:
        """A runner of its own process, as the agent's environment would have it."""
        command = [
            "runner",
            "integrations.verl_training.parts:talk",
            "--concurrency=8",
            "--lease=3",
        ]
        place = ["--store", self.url, "--run", "default", "--dir", str(self.folder)]
        process = subprocess.Popen(
            [sys.executable, "-m", "whet", *command, *place],
            env={**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"},
        )
        self._runners.append(process)
        return process

    def submit(self, tasks: list[dict[str, Any]], partition: str = "train") -> list[str]:
        """Give prompts to the manager as the trainer does; returns their uids."""
        import numpy as np
        from torch.utils.data import DataLoader
        from verl.utils import tensordict_utils as tu
        from verl.utils.dataset.rl_dataset import collate_fn

        from whet.trainers.verl.dataset import TaskDataset

        file = self.folder / f"{uuid.uuid4().hex}.jsonl"
        file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        loader: Any = DataLoader(
            TaskDataset([str(file)]), batch_size=len(tasks), collate_fn=collate_fn
        )
        [columns] = list(loader)
        columns["uid"] = np.array([str(uuid.uuid4()) for _ in tasks], dtype=object)
        batch = tu.get_tensordict(columns)
        tu.assign_non_tensor_data(batch, "global_steps", VERSION)
        if partition == "val":
            import transfer_queue as tq

            tu.assign_non_tensor_data(batch, "validate", True)
            tags = [{"is_prompt": True, "status": "pending", "global_steps": VERSION}] * len(tasks)
            tq.kv_batch_put(keys=list(columns["uid"]), partition_id="val", tags=tags)
            self.manager.generate_sequences(batch)
        else:
            self.trainer._submit_batch_to_rollout(batch)
        return list(columns["uid"])

    def sample(self, prompts: int, partition: str = "train") -> Any:
        """Wait for prompts in verl's replay buffer, and take their rows."""
        found, _ = self.trainer.replay_buffer.sample(
            global_steps=VERSION, partition_id=partition, batch_size=prompts
        )
        return found

    def read(self, batch: Any, fields: list[str]) -> Any:
        import transfer_queue as tq

        return tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )

    def clear(self, batch: Any, uids: list[str]) -> None:
        import transfer_queue as tq

        tq.kv_clear(keys=[*batch.keys, *uids], partition_id=batch.partition_id)

    def ask(self, question: Callable[[SQLiteStore], Any]) -> Any:
        async def ask() -> Any:
            async with SQLiteStore(self.folder / "store.db") as store:
                return await question(store)

        return asyncio.run(ask())

    def close(self) -> None:
        for process in self._runners:
            process.kill()
            process.wait()
