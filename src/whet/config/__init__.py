"""Typed config of a run. No heavy imports, no side effects."""

from whet.config.engines import (
    Layer,
    LocalEngineConfig,
    LocalTrainerConfig,
    SGLangConfig,
    TinkerConfig,
    VerlConfig,
    VLLMConfig,
)
from whet.config.learning import (
    AdamConfig,
    AdamStep,
    AlgorithmConfig,
    CurriculumConfig,
    EvaluationConfig,
    FailureRewardConfig,
    LengthConfig,
    LoopConfig,
    LossConfig,
    SelectionConfig,
    SupervisedConfig,
)
from whet.config.limits import BudgetConfig, CheckpointsConfig
from whet.config.policy import PolicyConfig
from whet.config.run import (
    UNIONS,
    EngineConfig,
    RunConfig,
    TrainerConfig,
    explain,
    merge,
    read_toml,
    resolve,
)
from whet.config.running import (
    DashboardConfig,
    GatewayConfig,
    RunnerConfig,
    TracerName,
    TrackingConfig,
)
from whet.config.section import (
    Section,
    changed_keys,
)

__all__ = [
    "UNIONS",
    "AdamConfig",
    "AdamStep",
    "AlgorithmConfig",
    "BudgetConfig",
    "CheckpointsConfig",
    "CurriculumConfig",
    "DashboardConfig",
    "EngineConfig",
    "EvaluationConfig",
    "FailureRewardConfig",
    "GatewayConfig",
    "Layer",
    "LengthConfig",
    "LocalEngineConfig",
    "LocalTrainerConfig",
    "LoopConfig",
    "LossConfig",
    "PolicyConfig",
    "RunConfig",
    "RunnerConfig",
    "SGLangConfig",
    "Section",
    "SelectionConfig",
    "SupervisedConfig",
    "TinkerConfig",
    "TracerName",
    "TrackingConfig",
    "TrainerConfig",
    "VLLMConfig",
    "VerlConfig",
    "changed_keys",
    "explain",
    "merge",
    "read_toml",
    "resolve",
]
