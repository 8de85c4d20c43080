"""`agentrl sft`."""

from agentrl.cli.settings_command import settings_command
from agentrl.config.settings import RunSettings

PRESETS = {"sft_turns": "all", "loss_type": "sft_loss", "calculate_per_token_loss": True, "input_key": "messages"}
PRESETS |= {"n_samples_per_prompt": 1, "rollout_shuffle": True, "lr": 1e-5}
"""Defaults of this command that differ from those of `train`; a file and flags override them."""


@settings_command("train", name="sft", presets=PRESETS)
def command(settings: RunSettings) -> int:
    """Teach a model by examples: whole conversations, tool calls included (supervised fine-tuning).

    A row of --prompt-data has a list of chat messages under `messages`, which ends with the assistant, and may have
    schemas under `tools`. What the assistant wrote is learned; a message with "loss": false is only shown. It is one pass
    over the data (--num-epoch), in steps of --rollout-batch-size conversations. The same --output-dir given again resumes.

    Defaults that are not those of `agentrl train`: --input-key messages, --lr 1e-5, --rollout-shuffle,
    --calculate-per-token-loss, and what makes it learn from conversations."""
    from agentrl.cluster.launch import train

    return train(settings)
