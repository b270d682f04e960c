"""Every drafter, by the name `speculative_config["method"]` knows it under."""

from jspec.drafters import draft_model, ngram, none
from jspec.drafters.base import Drafter, DrafterSetup

# name -> build(DrafterSetup) -> (Drafter, its parameters)
DRAFTERS = {
    "none": none.build,
    "ngram": ngram.build,
    "draft_model": draft_model.build,
}

__all__ = ["DRAFTERS", "Drafter", "DrafterSetup"]
