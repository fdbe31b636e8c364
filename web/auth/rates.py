"""Rate limits: a token bucket for each client, in a bounded table."""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from embedfarm.contract.settings import Settings


@dataclass
class Buckets:
    """Token buckets by client.

    A client that is not in the table has a full bucket; the one that was not heard of for longest
    leaves it.

    Attributes:
        per_second: Tokens that a bucket gains in a second; 0 for no limit.
        burst: Tokens in a full bucket.
        clients_max: Most buckets that are kept.
    """

    per_second: float
    burst: int
    clients_max: int
    _buckets: "OrderedDict[str, tuple[float, float]]" = field(default_factory=OrderedDict)

    def take(self, client: str, now: float) -> float:
        """Take a token; return 0 if there was one, else the seconds until there will be.

        Args:
            client: Name of the bucket.
            now: Monotonic time in seconds.
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


class TooMuchError(RuntimeError):
    """Raised when a tenant asks for more than it may have.

    Attributes:
        retry_after_seconds: Seconds after which it is worth trying again.
    """

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass
class TenantTurns:
    """Limits for the requests of all keys of a tenant together; it knows tenants with a key only.

    Attributes:
        settings: The farm's settings, which have the limits.
        running: Requests in work, by tenant.
    """

    settings: Settings
    running: Counter[str] = field(default_factory=Counter)
    _buckets: dict[str, Buckets] = field(default_factory=dict)

    @contextmanager
    def turn(self, tenant: str | None, now: float) -> Iterator[None]:
        """Count one request of a tenant, from its beginning to the end of the answer.

        Args:
            tenant: Tenant that asks; None for an operator, who has no limit here.
            now: Monotonic time in seconds.

        Raises:
            TooMuchError: The tenant may have no other request now.
        """
        if tenant is None:
            yield
            return
        most = self.settings.limits_of(tenant).requests
        if most is not None and self.running[tenant] >= most:
            raise TooMuchError(
                f"requests: tenant {tenant} may have {most:,} in work, and has them", 1
            )
        self._take(tenant, now)
        self.running[tenant] += 1
        try:
            yield
        finally:
            self.running[tenant] -= 1

    def _take(self, tenant: str, now: float) -> None:
        rate = self.settings.limits_of(tenant).requests_per_second
        if rate is None:
            return
        bucket = self._buckets.setdefault(tenant, Buckets(rate, math.ceil(rate), 1))
        seconds = bucket.take(tenant, now)
        if seconds:
            message = f"requests_per_second: tenant {tenant} may have {rate:g}"
            raise TooMuchError(message, seconds)
