"""`remote_rm`: gets the reward from your HTTP server (`--rm-url`).

1. The server gets `{"prompt", "response", "label", "metadata"}` by POST and answers a number, or an object with
   `score` or `reward` and optionally `correct`, `extracted`, `reason`. The object's other numbers become parts.
2. `prompt` is the metadata's `prompt`, which the rollout sets to the sample's prompt, or null if it is missing.
3. If the answer has no `correct`, a positive score counts as right."""

from typing import Any

from agentrl.errors import SettingsError
from agentrl.rm_hub.grade import Grade, GraderService, Metadata
from agentrl.rm_hub.reading.common import finite
from agentrl.rm_hub.running.http import JsonService
from agentrl.rm_hub.settings import RmHubSettings

_EXPECTED = 'a finite number, or an object with a number under "score" or "reward"'


class RemoteRM(GraderService):
    """An async context manager: the connection to a reward server. Raises SettingsError: `rm_url` is not an address."""

    def __init__(self, settings: RmHubSettings) -> None:
        if not settings.rm_url:
            raise SettingsError("--rm-type remote_rm needs --rm-url, the address that answers a reward")
        timeout, concurrency = settings.rm_timeout, settings.rm_concurrency
        self._service = JsonService(settings.rm_url, "the reward server", "--rm-url", "grader", timeout, concurrency)
        super().__init__(self._service)

    async def grade(self, response: str, label: Any, metadata: Metadata) -> Grade:
        """Ask the server. Raises GraderFailure: `grader_unreachable`, `grader_timeout`, `grader_http_STATUS`,
        `grader_bad_answer`; `grader_bad_metadata` if label or metadata are not JSON."""
        rest = {name: value for name, value in metadata.items() if name != "prompt"}
        asked = {"prompt": metadata.get("prompt"), "response": response, "label": label, "metadata": rest}
        answer = await self._service.post(asked)
        if (grade := read_answer(answer)) is None:
            raise self._service.bad_answer(_EXPECTED, answer)
        return grade


def read_answer(answer: Any) -> Grade | None:
    """Return a reward server's JSON as a grade; None if it has no finite score."""
    told = answer if isinstance(answer, dict) else {"score": answer}
    numbers = {name: number for name, value in told.items() if (number := finite(value)) is not None}
    reward = numbers.pop("reward", None)
    score = numbers.pop("score", None if "score" in told else reward)
    if score is None:
        return None
    correct = told["correct"] if isinstance(told.get("correct"), bool) else score > 0
    extracted = told["extracted"] if isinstance(told.get("extracted"), str) else None
    reason = told["reason"] if isinstance(told.get("reason"), str) else "scored by the reward server"
    return Grade(score, correct, extracted, reason, numbers)
