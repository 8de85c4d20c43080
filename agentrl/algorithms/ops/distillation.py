"""On-policy distillation: the teacher's opinion of each token that the student sampled, as a part of its advantage."""

import torch
from torch import Tensor

from agentrl.algorithms.base import AdvantageInputs, need


def reverse_kl(inputs: AdvantageInputs) -> Tensor:
    """log p_student - log p_teacher of the sampled tokens [N] float64, in nats; 0 where the mask is 0.

    Over tokens that the student sampled this is in the mean KL(student || teacher) of the next token, the reverse KL
    (K. Lu et al., "On-Policy Distillation", Thinking Machines Lab 2025; GKD, arXiv:2306.13649). The student's are the
    old log-probs. Subtracted from the advantage of its own token, it moves no token for what comes after it.

    Raises:
        TrainError: the student's or the teacher's log-probs are missing.
    """
    student = need(inputs.old_log_probs, "old_log_probs", "on-policy distillation").double()
    teacher = need(inputs.teacher_log_probs, "teacher_log_probs", "on-policy distillation").double()
    return torch.where(inputs.loss_mask > 0, student - teacher, 0.0)
