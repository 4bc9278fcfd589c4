"""Which stop string ended a generation."""

from whet.gateway.template import ChatTemplate
from whet.types import Generation


def matched_stop(generation: Generation, template: ChatTemplate) -> str | None:
    """The stop string that ended it, or None if something else did."""
    stops = generation.sampling.stop
    if generation.stop != "stop" or not stops:
        return None
    text = template.decode(generation.tokens)
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None
