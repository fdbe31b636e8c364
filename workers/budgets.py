"""Token budgets of device batches, learned on one device and shared with all of its kind."""

import logging
from dataclasses import dataclass, field

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.workers.engines.engine import Engine

log = logging.getLogger(__name__)


@dataclass
class Budgets:
    """Budgets by model on one kind of device, in padded tokens, or plain ones without padding.

    A batch that does not fit halves the budget, for all workers on such devices and for later
    jobs. The farm forgets it after a while: something else may have held the memory.

    Attributes:
        farm: Farm through which budgets are shared; None keeps them here.
        device: Kind of the device.
        batch_tokens_max: Tokens with which a budget begins; 0 takes the engine's own.
    """

    farm: FarmClient | None = None
    device: str = ""
    batch_tokens_max: int = 0
    _known: dict[str, int] = field(default_factory=dict)

    def tokens(self, spec: JobSpec, engine: Engine) -> int:
        """Return the budget of a job's device batches in tokens."""
        model = model_key(spec)
        if model not in self._known:
            start = self.batch_tokens_max or engine.batch_tokens
            self._known[model] = min(start, self._shared(model) or start)
        return self._known[model]

    def halve(self, spec: JobSpec, tokens: int) -> None:
        """Learn that a device batch of so many tokens does not fit."""
        model = model_key(spec)
        self._known[model] = max(1, min(tokens // 2, self._known.get(model, tokens)))
        log.warning("a device batch of %d tokens does not fit; halved", tokens)
        if self.farm is None:
            return
        try:
            self.farm.statistics.learn_budget(self.device, model, self._known[model])
        except UNAVAILABLE as error:
            log.warning("budget kept here only, server away: %s", error)

    def _shared(self, model: str) -> int:
        """Return the budget that others have learned; 0 when nothing is known."""
        if self.farm is None:
            return 0
        try:
            return self.farm.statistics.budget(self.device, model)
        except UNAVAILABLE as error:
            log.warning("budget not asked for, server away: %s", error)
            return 0
