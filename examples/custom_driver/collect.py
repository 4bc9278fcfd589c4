"""A custom driver in twenty lines: enqueue problems, wait for them, and print the sampled tokens.

Run it alone, or with WHET_STORE set beside `whet store`, `whet serve` and
`whet runner examples/custom_driver/collect.py:solve`.
"""

from statistics import fmean

import whet
from whet.demos.arithmetic import solve
from whet.demos.problems import problems


@whet.algorithm
async def collect(store, tasks):
    ids = [f"problem-{number}" for number in range(len(tasks))]
    await store.enqueue(
        [whet.Rollout(id=id, group=id, task=task) for id, task in zip(ids, tasks, strict=True)]
    )
    await store.wait(ids)
    solved = await store.trajectories(ids)
    if not solved:
        reasons = list((await store.failures(ids)).values())
        raise whet.WhetError(f"all {len(ids)} rollouts failed, such as: {reasons[0]}")
    for found in solved:
        turns = [generation.tokens for call in found.calls for generation in call.generations]
        print(found.attempt.rollout.id, found.reward, "token ids:", *map(list, turns))
    accuracy = fmean(found.reward for found in solved)
    print(f"accuracy {accuracy:.0%} of {len(solved)}")
    return accuracy


if __name__ == "__main__":
    collect.run(solve, problems("test", 8, seed=1))
