"""`APO(client)`: whet's beam search over prompts, with the arguments of Agent Lightning."""

from collections.abc import Callable, Sequence
from typing import Any

from whet.agl.algorithm.base import Algorithm
from whet.agl.types import NamedResources, PromptTemplate
from whet.errors import ConfigError
from whet.types import Endpoint


class APO(Algorithm):
    """Searches for a better prompt with `whet.APO`, whose run folder has the details."""

    def __init__(
        self,
        async_openai_client: Any,
        *,
        gradient_model: str = "gpt-5-mini",
        apply_edit_model: str | None = None,
        gradient_batch_size: int = 4,
        beam_width: int = 4,
        branch_factor: int = 4,
        beam_rounds: int = 3,
        **settings: Any,
    ) -> None:
        """`async_openai_client` is an `AsyncOpenAI`; `settings` are keys of whet's config.

        Raises:
            NotImplementedError: two models are requested.
        """
        super().__init__()
        if apply_edit_model not in (None, gradient_model):
            raise NotImplementedError(
                "APO: the same model critiques and edits prompts: leave out apply_edit_model"
            )
        self._endpoint = Endpoint(
            base_url=str(async_openai_client.base_url).rstrip("/"),
            api_key=async_openai_client.api_key,
            model=gradient_model,
        )
        self._options = {
            "rounds": beam_rounds,
            "beam": beam_width,
            "branches": branch_factor,
            "minibatch": gradient_batch_size,
        }
        self._config = settings
        self.result: Any = None
        """What `whet.APO` returned. Any: its type is imported with the rest of whet."""

    def get_best_prompt(self) -> PromptTemplate:
        """Return the best prompt. Raises ValueError before `Trainer.fit`."""
        if self.result is None:
            raise ValueError("there is no best prompt yet: call Trainer.fit")
        [text, *_] = self.result.best_prompts.values()
        return PromptTemplate(template=text, engine="f-string")

    def search(
        self,
        agent: Callable[..., Any],
        tasks: Sequence[Any],
        held_out: Sequence[Any],
        initial: NamedResources,
        **options: Any,
    ) -> Any:
        """Search with an agent of whet. Returns the result of `whet.APO`."""
        import whet  # noqa: PLC0415 - imports torch

        prompts = {
            name: {"template": resource.template}
            for name, resource in initial.items()
            if isinstance(resource, PromptTemplate)
        }
        if not prompts:
            raise ConfigError("APO needs a PromptTemplate among the trainer's initial_resources")
        search = whet.APO(reflection=self._endpoint, **self._options)
        self.result = search.run(
            agent, tasks, held_out=held_out, resources=prompts, **self._config, **options
        )
        return self.result
