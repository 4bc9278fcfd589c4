"""The `agl.algorithm` package, which is also a decorator: `@agl.algorithm` is `@agl.algo`."""

import sys
from types import ModuleType
from typing import Any

from whet.agl.algorithm.apo import APO
from whet.agl.algorithm.base import Algorithm, Baseline, FastAlgorithm, FunctionalAlgorithm, algo
from whet.agl.algorithm.verl import VERL

__all__ = ["APO", "VERL", "Algorithm", "Baseline", "FastAlgorithm", "algo"]


class _AlgorithmModule(ModuleType):
    """The module's class, which makes the module callable as a decorator."""

    def __call__(self, func: Any) -> FunctionalAlgorithm:
        return algo(func)


sys.modules[__name__].__class__ = _AlgorithmModule
