"""The arithmetic of Kubernetes' horizontal autoscaler for one external metric with an average as its target. Pure.

Source: the documented algorithm of autoscaling/v2: https://kubernetes.io/docs/concepts/workloads/autoscaling/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Interval at which the controller looks, and the deviation from the target within which it does nothing.
SYNC_S = 15.0
TOLERANCE = 0.1
#: The controller's default window for scaling down.
_DOWN_WINDOW_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How far replicas may change within a period."""

    kind: str
    value: int
    period_s: float

    def limit(self, at_start: int, *, up: bool) -> int:
        """The bound on replicas, from the number at the start of the period."""
        if self.kind == "Pods":
            return at_start + self.value if up else at_start - self.value
        share = self.value / 100
        return math.ceil(at_start * (1 + share)) if up else math.floor(at_start * (1 - share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """The behaviour in one direction."""

    window_s: float
    policies: tuple[Policy, ...]
    select: str

    @classmethod
    def from_manifest(cls, spec: Mapping[str, Any], default_window_s: float) -> Direction:
        """`behavior.scaleUp` or `behavior.scaleDown`."""
        return cls(
            window_s=float(spec.get("stabilizationWindowSeconds", default_window_s)),
            policies=tuple(
                Policy(kind=policy["type"], value=policy["value"], period_s=policy["periodSeconds"])
                for policy in spec["policies"]
            ),
            select=spec.get("selectPolicy", "Max"),
        )


@dataclass(slots=True, kw_only=True)
class Autoscaler:
    """One autoscaler and the replicas it has set. It assumes that what it asks for starts at once."""

    target: float
    minimum: int
    maximum: int
    up: Direction
    down: Direction
    replicas: int
    #: What the metric alone asked for, with the time.
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    #: Changes of the replicas, with the time.
    _changes: list[tuple[float, int]] = field(default_factory=list)

    @classmethod
    def from_scaled_object(cls, spec: Mapping[str, Any]) -> Autoscaler:
        """The autoscaler that KEDA makes of a ScaledObject with one trigger."""
        [trigger] = spec["triggers"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        return cls(
            target=float(trigger["metadata"]["threshold"]),
            minimum=spec["minReplicaCount"],
            maximum=spec["maxReplicaCount"],
            up=Direction.from_manifest(behavior["scaleUp"], 0.0),
            down=Direction.from_manifest(behavior["scaleDown"], _DOWN_WINDOW_S),
            replicas=spec["minReplicaCount"],
        )

    def sync(self, now: float, value: float | None) -> int:
        """One look at the metric's value, None for none, which changes nothing. Returns the replicas."""
        if not self._recommended:  # The controller starts with what it finds.
            self._recommended.append((now, self.replicas))
        if value is None:
            return self.replicas
        wanted = self._stabilized(now, self._proposal(value))
        wanted = self._limited(now, min(max(wanted, self.minimum), self.maximum))
        if wanted != self.replicas:
            self._changes.append((now, wanted - self.replicas))
            self.replicas = wanted
        return self.replicas

    def _proposal(self, value: float) -> int:
        ratio = value / (self.target * self.replicas)
        return self.replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(value / self.target)

    def _stabilized(self, now: float, proposal: int) -> int:
        """The proposal nearest to the present replicas among those of each direction's window."""
        earlier = list(self._recommended)
        self._recommended.append((now, proposal))
        lowest = min([proposal, *(wanted for at, wanted in earlier if at > now - self.up.window_s)])
        highest = max([proposal, *(wanted for at, wanted in earlier if at > now - self.down.window_s)])
        return min(max(self.replicas, lowest), highest)

    def _limited(self, now: float, wanted: int) -> int:
        if wanted > self.replicas:
            return min(wanted, max(self.replicas, self._bound(now, self.up, up=True)))
        if wanted < self.replicas:
            return max(wanted, min(self.replicas, self._bound(now, self.down, up=False)))
        return wanted

    def _bound(self, now: float, direction: Direction, *, up: bool) -> int:
        bounds = [policy.limit(self._at_start(now - policy.period_s, up=up), up=up) for policy in direction.policies]
        farthest, nearest = (max, min) if up else (min, max)
        return farthest(bounds) if direction.select == "Max" else nearest(bounds)

    def _at_start(self, since: float, *, up: bool) -> int:
        """Replicas before the changes of this direction since then."""
        return self.replicas - sum(change for at, change in self._changes if at > since and (change > 0) == up)


def replay(autoscaler: Autoscaler, samples: Sequence[tuple[float, float | None]]) -> list[int]:
    """Replicas after each sample."""
    return [autoscaler.sync(at, value) for at, value in samples]
