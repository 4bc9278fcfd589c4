"""Rank process of training on several GPUs: `python -m whet.app.composition.training_rank`.

The process that trains starts it, gives it its settings and then its work, over a socket.
"""

import sys
from collections.abc import Sequence

from whet.app.composition.trainers import RankSettings, load_loss, load_policy
from whet.errors import TrainerError, WhetError, boundary
from whet.io.process import follow_supervisor
from whet.trainers.parallel.data_parallel import RankWorker
from whet.trainers.parallel.ranks import RankCommand, RankReply, join_ranks
from whet.trainers.parallel.sharded import ModelShard


def main(arguments: Sequence[str]) -> int:
    """Compute gradients of rows until the first process ends."""
    follow_supervisor()
    try:
        own, settings = join_ranks(arguments, RankSettings)
        config = settings.config
        custom = load_loss(config.loss.name)
        policy = load_policy(config, settings.model)
        own.channel.send(RankReply())
        if (first := own.channel.receive(RankCommand)) is None:
            return 0  # the first process ended while this one loaded its model
        own.address.connect(policy.device)
        if first.shard:
            with boundary(TrainerError, "cannot shard the model"):
                part = ModelShard(policy, own.address, custom_loss=custom)
            own.channel.send(RankReply())
            own.serve(part.run, ends_on_error=True)
        else:
            own.channel.send(RankReply())
            RankWorker(policy, own, custom_loss=custom).serve()
    except WhetError as error:
        sys.stderr.write(f"whet: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
