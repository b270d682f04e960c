"""Options of method "suffix"."""

from __future__ import annotations

import dataclasses

from jspec.config.checks import check_int, check_number
from jspec.config.draft_trees import check_size
from jspec.config.methods.options import LookupOptions


@dataclasses.dataclass(frozen=True)
class SuffixOptions(LookupOptions):
  suffix_decoding_max_tree_depth: int = 24  # longest match
  suffix_decoding_max_cached_requests: int = 10000  # past outputs searched, too: as many as fit
  suffix_decoding_max_spec_factor: float = 1.0  # draft tokens per matched token
  suffix_decoding_min_token_prob: float = 0.1  # of a path
  tree_total_tokens: int = 0  # nodes of a tree, root included; 0: chains

  def __post_init__(self):
    check_int("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 1)
    check_int("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
    check_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0, 1e6)
    check_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0, 1)
    check_size("tree_total_tokens", check_int("tree_total_tokens", self.tree_total_tokens, 0))
