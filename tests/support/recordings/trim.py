"""Keep of recorded SDK traffic what a replay needs: what was asked, and what was answered.

    python tests/support/recordings/trim.py RECORDED.jsonl...

A recorder writes one JSON object for each request, in order of arrival: `sdk run method path
headers body status reply`, where a streamed reply is the list of its events. Each file becomes
`<name>.jsonl.gz` beside this program. Token ids, log-probabilities, time stamps and the headers
that say nothing to a server are left out, and a reply becomes the turn a client reads from it.
"""

import gzip
import json
import sys
from dataclasses import asdict
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1]))

from support.gateway.wire import Json, read_reply  # noqa: E402

KEPT = ("anthropic-version", "anthropic-beta", "x-stainless-retry-count", "accept")
KEYS = ("authorization", "x-api-key")


def trim(record: Json) -> Json:
    headers = {name.lower(): value for name, value in record["headers"]}
    kept = {name: headers[name] for name in KEPT if name in headers}
    turns: list[Json] = []
    if record["status"] == 200 and not record["path"].endswith("/count_tokens"):
        turns = [
            {key: value for key, value in asdict(turn).items() if value}
            for turn in read_reply(record["path"], record["reply"])
        ]
    return {
        "sdk": record["sdk"],
        "run": record["run"],
        "method": record["method"],
        "path": record["path"],
        "key": next(name for name in KEYS if name in headers),
        "headers": kept,
        "body": record["body"],
        "status": record["status"],
        "turns": turns,
    }


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        records = [trim(json.loads(line)) for line in path.read_text().splitlines()]
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        target = FOLDER / f"{path.stem}.jsonl.gz"
        # Without a time stamp, so that the same traffic gives the same file.
        target.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
