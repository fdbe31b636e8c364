"""How often somebody may ask: a bucket of tokens for each, in a bounded table."""

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass
class Buckets:
    """Token buckets by client.

    A client that is not in the table has a full bucket; the one that was not heard of for longest
    leaves it.

    Attributes:
        per_second: Tokens that a bucket gains; 0 for no limit.
        burst: Tokens in a full bucket.
        clients_max: Buckets kept.
    """

    per_second: float
    burst: int
    clients_max: int
    _buckets: "OrderedDict[str, tuple[float, float]]" = field(default_factory=OrderedDict)

    def take(self, client: str, now: float) -> float:
        """Take a token; 0 if there was one, else seconds until there will be.

        Args:
            client: Whose.
            now: Monotonic time.
        """
        if not self.per_second:
            return 0.0
        tokens, seen = self._buckets.pop(client, (float(self.burst), now))
        tokens = min(self.burst, tokens + (now - seen) * self.per_second)
        lacking = max(0.0, 1 - tokens)
        self._buckets[client] = (tokens if lacking else tokens - 1, now)
        if len(self._buckets) > self.clients_max:
            self._buckets.popitem(last=False)
        return lacking / self.per_second
