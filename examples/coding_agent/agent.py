"""An agent that writes a function until its tests pass. It knows nothing of whet.

It is a command that is started once for each attempt, in an empty folder, and best in a sandbox:
it runs what the model writes. The task is in $WHET_TASK_FILE, the model in $OPENAI_BASE_URL,
$OPENAI_API_KEY and $OPENAI_MODEL; the last line that it prints is the reward, the share of tests
that pass. Nothing but the standard library is needed.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

SYSTEM = "Write the Python function that is asked for, in one block of code, and nothing else."
TURNS = 2
SECONDS = 5
"""For one test."""
BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def main() -> None:
    task = json.loads(Path(os.environ["WHET_TASK_FILE"]).read_text())
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    reward = 0.0
    for _ in range(TURNS):
        reply = ask(messages)
        Path("solution.py").write_text(read_code(reply))
        failures = [error for test in task["tests"] if (error := run(test))]
        reward = 1 - len(failures) / len(task["tests"])
        if not failures:
            break
        messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": f"This test fails:\n{failures[0]}"})
    print(reward)


def ask(messages: list[dict[str, str]]) -> str:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 256}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "content-type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def read_code(reply: str) -> str:
    """The last block of code of a reply, or all of it."""
    blocks = BLOCK.findall(reply)
    return blocks[-1] if blocks else reply


def run(test: str) -> str | None:
    """Run one test against solution.py, in a process of its own; return why it fails."""
    program = f"from solution import *\n{test}\nprint('passed')\n"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{test}\nit takes more than {SECONDS} s"
    # Code that exits early has not passed, whatever its status.
    if done.returncode == 0 and done.stdout.endswith("passed\n"):
        return None
    return f"{test}\n{(done.stderr or 'it ended early').strip().splitlines()[-1][:200]}"


if __name__ == "__main__":
    main()
