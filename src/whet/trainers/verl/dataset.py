"""Tasks as a dataset of verl."""

import json
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

DATA_SOURCE = "whet"


class TaskDataset(Dataset[dict[str, Any]]):
    """Tasks of a file with one JSON value a line.

    verl wants a chat for each sample, which it only logs: what an agent makes of its task is its
    own affair. The task itself travels as JSON.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any = None,
        config: Any = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        """`data_files` is one path or several; verl passes the rest to every dataset."""
        names = [data_files] if isinstance(data_files, str) else list(data_files)
        lines = [line for name in names for line in Path(name).read_text().splitlines() if line]
        self._tasks = [json.loads(line) for line in lines]
        if max_samples > 0:
            self._tasks = self._tasks[:max_samples]

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task = self._tasks[index]
        text = task if isinstance(task, str) else json.dumps(task)
        return {
            "raw_prompt": [{"role": "user", "content": text}],
            "index": index,
            "task": json.dumps(task),
            "data_source": DATA_SOURCE,
            "reward_model": {"ground_truth": ""},
        }
