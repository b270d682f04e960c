"""The rule by which draft tokens are accepted."""

from __future__ import annotations

import dataclasses

VERIFICATIONS = ("lossless", "block", "lossy_typical", "lossy_synthetic")


@dataclasses.dataclass(frozen=True)
class Verification:
  """The rule by which draft tokens are accepted: all but those named lossy keep the target's law.

  "block" is lossless too: chains of sampled drafts are judged as a whole (see verify_block).
  """

  name: str = "lossless"  # one of VERIFICATIONS
  posterior_threshold: float = 0.09  # of lossy_typical
  posterior_alpha: float = 0.3
  rates: tuple[float, ...] = ()  # of lossy_synthetic: chance that draft token i and all before pass

  @property
  def is_lossy(self) -> bool:
    return self.name.startswith("lossy")

  def __post_init__(self):
    if self.name not in VERIFICATIONS:
      raise ValueError(f"verification {self.name!r} is not one of {VERIFICATIONS}")
    for name in ("posterior_threshold", "posterior_alpha"):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{name} must be a number in (0, 1], got {value!r}")
    if (self.name == "lossy_synthetic") != bool(self.rates):
      raise ValueError("synthetic acceptance rates belong to verification 'lossy_synthetic' alone, "
                       f"got {self.rates} with {self.name!r}")
    if any(not 0 <= r <= 1 for r in self.rates) or list(self.rates) != sorted(
        self.rates, reverse=True):
      raise ValueError("synthetic acceptance rates must lie in [0, 1] and never rise, got "
                       f"{list(self.rates)}")
