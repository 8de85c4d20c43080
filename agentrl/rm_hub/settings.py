"""Settings of the graders: servers to ask, and how long a grade may take."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from agentrl.settings import Settings


class RmHubSettings(Settings):
    """Limits of graders, and servers that some of them ask."""

    grader_processes: PositiveInt | None = Field(None, description="Grading processes; default: one a core, at most 8.")
    grader_timeout: PositiveFloat = Field(10.0, description="Seconds a grader may take for one answer.")
    grader_memory_mb: int = Field(1024, ge=64, description="MiB that grading one answer may take, without libraries.")
    grader_recycle: PositiveInt = Field(1000, description="Answers after which a grading process is replaced.")
    grader_total_timeout: PositiveFloat = 600.0
    """Seconds one grade may take in all, the wait for a free process or a server included."""

    rm_url: str | None = Field(None, description="Address of the reward server that --rm-type remote_rm asks.")
    rm_timeout: PositiveFloat = Field(30.0, description="Seconds the reward server may take for one answer.")
    rm_concurrency: PositiveInt = Field(64, description="Requests to the reward server at once.")

    judge_url: str | None = Field(None, description="OpenAI-compatible server that judges for --rm-type llm_judge.")
    judge_model: str = Field("default", min_length=1, description="Name of the judge's model on that server.")
    judge_rubric: str | None = None
    """Prompt of the judge: text or a file, with {question}, {response} and {label}."""
    judge_timeout: PositiveFloat = Field(60.0, description="Seconds the judge may take for one answer.")
    judge_concurrency: PositiveInt = Field(16, description="Requests to the judge at once.")
    judge_max_tokens: PositiveInt = Field(1024, description="Maximum tokens of the judge's answer.")
    judge_cache_path: str | None = Field(None, description="SQLite file of the judge's verdicts; it can be shared.")
    judge_api_key_env: str = Field("JUDGE_API_KEY", min_length=1)
    """Environment variable that holds the judge's API key, if it has one."""

    code_score: Literal["all", "fraction"] = "all"
    """Score of --rm-type code: 1 if all tests pass, or the fraction of them that pass."""
    code_test_timeout: PositiveFloat = Field(6.0, description="Seconds one test of submitted code may take.")
    code_timeout: PositiveFloat = Field(60.0, description="Seconds all tests of one submission may take together.")
    code_concurrency: PositiveInt = Field(4, description="Submissions that are tested at once.")
