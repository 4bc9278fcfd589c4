"""Another process of a training on several GPUs: `python -m whet.app.composition.training_rank`.

The process that trains starts it, gives it its settings and then its work, over a socket.
"""

import sys
from collections.abc import Sequence

from whet.app.composition.trainers import RankSettings, load_loss, load_policy
from whet.errors import WhetError
from whet.io.process import follow_supervisor
from whet.trainers.data_parallel import RankWorker
from whet.trainers.ranks import join_ranks


def main(arguments: Sequence[str]) -> int:
    """Compute gradients of rows until the first process ends."""
    follow_supervisor()
    try:
        own, settings = join_ranks(arguments, RankSettings)
        config = settings.config
        custom = load_loss(config.loss.name)
        policy = load_policy(config, settings.model)
        RankWorker(policy, own, custom_loss=custom).serve()
    except WhetError as error:
        sys.stderr.write(f"whet: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
