"""Support for users of retrain: its settings files, environments, rewards, and the records in between."""

from agentrl.compat.retrain.config import AlgorithmConfig as AlgorithmConfig
from agentrl.compat.retrain.config import TrainingConfig as TrainingConfig
from agentrl.compat.retrain.environments import EnvironmentBridge as EnvironmentBridge
from agentrl.compat.retrain.environments import FastMCPEnv as FastMCPEnv
from agentrl.compat.retrain.formats import DataFormatBridge as DataFormatBridge
from agentrl.compat.retrain.formats import LLMAction as LLMAction
from agentrl.compat.retrain.formats import RawRolloutData as RawRolloutData
from agentrl.compat.retrain.rewards import RewardBridge as RewardBridge
from agentrl.compat.retrain.rewards import RewardCalculator as RewardCalculator
from agentrl.compat.retrain.rewards import reward as reward
from agentrl.compat.retrain.trainer import RolloutBridge as RolloutBridge
from agentrl.compat.retrain.trainer import SlimeTrainerAdapter as SlimeTrainerAdapter
