"""The draw of prompts by difficulty (`--prompt-order difficulty`).

1. A trajectory succeeds if its reward is at least `SUCCESS`. With success rate p of a prompt, its rewards vary by p(1 - p)
   within a group: prompts of middle difficulty teach most. Sampling for learnability: Rutherford et al. 2024
   (arXiv:2408.15099); for language models: Foster et al. 2025 (arXiv:2502.12272).
2. The estimate of p is a Beta distribution: a uniform prior, and the successes and failures of the prompt's groups. The
   model learns, so that the weight of a result halves in `HALF_LIFE` rollouts. This discounted posterior per prompt
   is that of MoPPS: Qu et al. 2025 (arXiv:2507.04632). MoPPS samples p from it; here the expected variance decides.
3. A draw proposes `PROPOSALS` prompts at random and takes the prompt of the largest expected p(1 - p). It leaves out
   prompts whose groups are not trained yet, and prompts that were drawn under the same weight version. A draw therefore
   uses no result of its own version: the order in which groups of a rollout end does not matter. If all proposed prompts
   are left out, it takes the first.
4. Every `IN_TURN`-th draw takes the next prompt of the data's own order instead. Bound: with n prompts, each prompt is
   drawn at least once in each `IN_TURN` * n draws, counted from the first draw.
5. A draw is a function of the seed, its position, its version, and the groups and results in the ledger, which has the
   prompt of each group too. A resumed run therefore draws what the killed run would have drawn."""

from collections.abc import Sequence
from statistics import fmean

from agentrl.buffer.ledger import Ledger
from agentrl.data.order import DataPosition, PromptOrder, mix

PRIOR, HALF_LIFE, PROPOSALS, IN_TURN = 1.0, 64, 64, 5


def expected_variance(successes: float, failures: float) -> float:
    """Return the mean of p(1 - p) if p has a Beta distribution with these two positive parameters."""
    total = successes + failures
    return successes * failures / (total * (total + 1))


class DifficultyOrder:
    """The draw from the prompts of `order` by the results in `ledger`. See the module."""

    def __init__(self, order: PromptOrder, ledger: Ledger) -> None:
        self._order, self._ledger, self._estimates, self._equal = order, ledger, list[float](), list[bool]()

    def at(self, position: int, version: int) -> DataPosition | None:
        """Return the prompt of the draw at `position` (from 0) under weight version `version`, or None after the last
        epoch: an epoch is as many draws as there are prompts."""
        if (end := self._order.at(position)) is None:
            return None
        turn, rest = divmod(position, IN_TURN)
        if rest:
            key = mix(mix(self._order.seed) ^ position)
            proposed = [mix(key + number) % self._order.rows for number in range(PROPOSALS)]
            busy = self._ledger.busy_prompts(version)
            proposed = [prompt for prompt in proposed if prompt not in busy] or proposed[:1]
        else:
            proposed = [(self._order.at(turn) or end).prompt_index]  # `turn` <= `position`: never None
        posteriors = self._posteriors(proposed, version)
        chosen = max(posteriors, key=lambda prompt: expected_variance(*posteriors[prompt]))
        self._estimates.append(posteriors[chosen][0] / sum(posteriors[chosen]))
        return DataPosition(end.epoch, chosen)

    def _posteriors(self, prompts: Sequence[int], version: int) -> dict[int, tuple[float, float]]:
        """Return the parameters of each prompt's Beta distribution: successes and failures."""
        found = dict.fromkeys(prompts, (PRIOR, PRIOR))
        for prompt, since, successes, trials in self._ledger.results(list(found)):
            weight, (good, bad) = 0.5 ** (max(0, version - since) / HALF_LIFE), found[prompt]
            found[prompt] = (good + weight * successes, bad + weight * (trials - successes))
        return found

    def finished(self, rewards: Sequence[float]) -> None:
        if rewards:
            self._equal.append(max(rewards) - min(rewards) < 1e-9)

    def figures(self) -> dict[str, float]:
        """Return the share of prompts with a result. Since the last call: the mean estimated success of the draws, and
        the share of finished groups with equal rewards."""
        estimates, equal, self._estimates, self._equal = self._estimates, self._equal, [], []
        found = {"prompts/seen": self._ledger.prompts_with_results() / self._order.rows}
        found |= {"prompts/estimated_success": fmean(estimates)} if estimates else {}
        return found | ({"prompts/equal_rewards": fmean(equal)} if equal else {})
