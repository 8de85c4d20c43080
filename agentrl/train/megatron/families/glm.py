"""Dense GLM-4: part of a head is rotated, in neighbouring pairs; biases by the config; one tensor for gate and up.

`glm4` (GLM-4-0414, GLM-Z1) has norms behind attention and MLP too.
"""

from agentrl.train.megatron.families.base import Family
from agentrl.train.megatron.families.rules import AFTER, ATTENTION, JOINED_MLP, NORMS, qkv_bias

_RULES = (*NORMS, *ATTENTION, *qkv_bias("attention_bias"), *JOINED_MLP)
GLM = Family("glm", _RULES, interleaved=True, partial=True)
GLM4 = Family("glm4", (*_RULES, *AFTER), interleaved=True, partial=True)
