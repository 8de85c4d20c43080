"""Instruction following: the verifiable constraints of IFBench and IFEval.

`constraint_kinds()` lists what is known; `grade_ifbench` is the grader behind `--rm-type ifbench`.
"""

from agentrl.rm_hub.ifbench.grader import constraint_kinds, grade_ifbench

__all__ = ["constraint_kinds", "grade_ifbench"]
