"""Support for users of retrain: its settings files, environments, rewards, and the records in between."""

from agentrl.compat.retrain.config import AlgorithmConfig, TrainingConfig
from agentrl.compat.retrain.environments import EnvironmentBridge, FastMCPEnv
from agentrl.compat.retrain.formats import DataFormatBridge, LLMAction, RawRolloutData
from agentrl.compat.retrain.rewards import RewardBridge, RewardCalculator, reward
from agentrl.compat.retrain.trainer import RolloutBridge, SlimeTrainerAdapter

__all__ = [
    "AlgorithmConfig", "DataFormatBridge", "EnvironmentBridge", "FastMCPEnv", "LLMAction", "RawRolloutData", "RewardBridge",
    "RewardCalculator", "RolloutBridge", "SlimeTrainerAdapter", "TrainingConfig", "reward",
]  # fmt: skip
