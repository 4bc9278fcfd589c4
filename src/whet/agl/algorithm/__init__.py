"""The `agl.algorithm` package; `@agl.algorithm` is `@agl.algo`, since programs use both names."""

import sys
from types import ModuleType
from typing import Any

from whet.agl.algorithm.apo import APO
from whet.agl.algorithm.base import Algorithm, Baseline, FastAlgorithm, FunctionalAlgorithm, algo
from whet.agl.algorithm.verl import VERL

__all__ = ["APO", "VERL", "Algorithm", "Baseline", "FastAlgorithm", "algo"]


class _AlgorithmModule(ModuleType):
    """This module, which is also the decorator of its name."""

    def __call__(self, func: Any) -> FunctionalAlgorithm:
        return algo(func)


sys.modules[__name__].__class__ = _AlgorithmModule
