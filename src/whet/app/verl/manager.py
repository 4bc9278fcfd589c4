"""The class that verl loads as its agent loop manager. Imported in verl's environment alone."""

from whet.app.verl.host import open_host
from whet.trainers.verl.bridge import BridgeManager


class Manager(BridgeManager):
    """Runs verl's prompts as rollouts of whet."""

    open_host = staticmethod(open_host)
