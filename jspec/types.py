"""Every pytree that crosses a module. No logic.

Letters: B slots, N tree nodes, D max depth, R packed rows, T tokens, V vocabulary, E width,
F feature width (0 where the drafter takes none), L layers, H query heads, K kv heads, h head dim,
P pages, S page size.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax

NO_PARENT = -1  # parent of the root, and of nodes a drafter left unused
PAD_TOKEN = -1  # filler in StepOutput.tokens and token histories


class KVPages(flax.struct.PyTreeNode):
  """One model's key/value cache: a buffer per layer, pages shared by all slots."""

  k: tuple[jax.Array, ...]  # L of [P, S, K*h]
  v: tuple[jax.Array, ...]  # L of [P, S, K*h]
  # Of 8-bit pages, which hold value / scale; () else.
  k_scale: tuple[jax.Array, ...] = ()  # L of f32[P, K, S]
  v_scale: tuple[jax.Array, ...] = ()  # L of f32[P, K, S]


class DraftTree(flax.struct.PyTreeNode):
  """Draft tokens as a rooted tree. A chain is the tree with parent[i] = i - 1.

  Node 0 is the root: the last emitted token, not yet in the target's KV cache.
  Nodes are in breadth-first order (parent[i] < i, depth never falls); siblings are in the
  order in which they are tried.
  """

  token: jax.Array  # i32[B, N]
  parent: jax.Array  # i32[B, N], NO_PARENT for the root and unused nodes
  # Distribution each node's token was drawn from; None: chosen deterministically (point mass).
  q_probs: jax.Array | None  # f32[B, N, V]


class Rows(flax.struct.PyTreeNode):
  """The tree nodes that this forward pass really computes, packed without gaps."""

  slot: jax.Array  # i32[R]
  node: jax.Array  # i32[R]
  valid: jax.Array  # bool[R]
  of_node: jax.Array  # i32[B, N], the row of each node; R for nodes left out


class Verdict(flax.struct.PyTreeNode):
  """What the target accepted: a root-to-node path, then one token of its own."""

  path: jax.Array  # i32[B, D + 1], node at each depth; path[:, 0] == 0
  num_accepted: jax.Array  # i32[B], draft tokens accepted, 0..D
  bonus: jax.Array  # i32[B], drawn from the target's residual distribution


class Slots(flax.struct.PyTreeNode):
  """Where some slots stand, as drafters see them."""

  index: jax.Array  # i32[B], which row of per-slot drafter state each is
  page_table: jax.Array  # i32[B, max_pages]
  length: jax.Array  # i32[B], tokens whose KV is committed
  temperature: jax.Array  # f32[B], 0 is greedy
  key: jax.Array  # key[B], already folded by position and the draft role
  feature: jax.Array  # f32[B, F], target features at length - 1; 0 where length is 0


class Committed(flax.struct.PyTreeNode):
  """Tokens just made permanent, as every drafter sees them."""

  token: jax.Array  # i32[B, T]
  next_token: jax.Array  # i32[B, T], what followed each of them
  feature: jax.Array  # f32[B, T, F], target features at each of them
  count: jax.Array  # i32[B], how many of the T are real


class Tails(flax.struct.PyTreeNode):
  """What it takes to go on after a page without computing any of it again.

  Of the last token of each full page.
  """

  hidden: jax.Array  # f32[P, E], the target's final hidden state
  feature: jax.Array  # f32[P, F], the drafter's features


class SlotSampling(flax.struct.PyTreeNode):
  """Sampling parameters of every slot and the token statistics they need."""

  temperature: jax.Array  # f32[B], 0 is greedy
  top_k: jax.Array  # i32[B], 0 is off
  top_p: jax.Array  # f32[B], 1 is off
  min_p: jax.Array  # f32[B], 0 is off
  repetition_penalty: jax.Array  # f32[B], 1 is off
  presence_penalty: jax.Array  # f32[B], 0 is off
  frequency_penalty: jax.Array  # f32[B], 0 is off
  min_tokens: jax.Array  # i32[B]
  logprobs: jax.Array  # bool[B], whether the request asked for them
  biased: jax.Array  # bool[B], whether any entry of `bias` is not 0
  bias: jax.Array  # f32[B, V], logit_bias; -inf for bad words of one token and what is not allowed
  token_flags: jax.Array  # u8[B, V], STOPS | NOT_BEFORE_MIN | IN_PROMPT of speculation/sampling.py
  output_count: jax.Array  # i32[B, V], occurrences among emitted tokens, root included
  bad_words: jax.Array  # i32[B, W, M], multi-token ones, right-aligned, PAD_TOKEN before
  recent: jax.Array  # i32[B, M - 1], last tokens of prompt + output, root last


class SpecState(flax.struct.PyTreeNode):
  """All that a speculation step reads and writes. Donated to it."""

  pages: KVPages
  tails: Tails
  page_table: jax.Array  # i32[B, max_pages]
  length: jax.Array  # i32[B], tokens whose KV is committed
  feature: jax.Array  # f32[B, F], target features at length - 1, see Slots
  root: jax.Array  # i32[B], last emitted token, KV not yet written
  active: jax.Array  # bool[B]
  num_output: jax.Array  # i32[B], emitted tokens, root included
  limit: jax.Array  # i32[B], num_output at which the slot stops
  max_draft: jax.Array  # i32[B], draft tokens allowed per step, 0 turns speculation off
  accepted: jax.Array  # f32[B], decayed count of draft tokens the target agreed with
  tested: jax.Array  # f32[B], decayed count of draft tokens compared with the target
  key: jax.Array  # key[B], one per request, folded by position and never advanced
  sampling: SlotSampling
  draft: Any


class StepInputs(flax.struct.PyTreeNode):
  """All else that a speculation step reads, and leaves as it is."""

  target: Any  # model/transformer.py's parameters
  draft: Any  # the drafter's
  max_draft: jax.Array  # i32[], draft tokens allowed per step and slot
  lag: jax.Array  # f32[], see plan.plan
  # f32[W], measured over predicted cost of each width; None where StepConfig.measured is not set.
  cost: jax.Array | None = None


class StepOutput(flax.struct.PyTreeNode):
  """Tokens of one or more steps; `T` is (D + 1) times the steps asked for."""

  tokens: jax.Array  # i32[B, T], PAD_TOKEN beyond num_tokens
  num_tokens: jax.Array  # i32[B]
  logprob: jax.Array  # f32[B, T], of each token, under the raw logits
  top_token: jax.Array  # i32[B, T, X]
  top_logprob: jax.Array  # f32[B, T, X]
  rank: jax.Array  # i32[B, T], of each token among the raw logits, 1 is the most likely
  drafted: jax.Array  # bool[B, T], whether the drafter had proposed each token
  finished: jax.Array  # bool[B], stopped during these steps: by a token, its limit, or a failure
  failed: jax.Array  # bool[B], the logits of the token that should come next are NaN or infinite
  num_steps: jax.Array  # i32[B], target forward passes each slot took part in
  num_drafts: jax.Array  # i32[B], of those, the ones with a draft
  drafted_at: jax.Array  # i32[B, N], steps by number of draft tokens verified
  accepted_at: jax.Array  # i32[B, D + 1], drafting steps by number of draft tokens accepted
  ran: jax.Array  # i32[W], steps at each of StepConfig.widths


class FirstToken(flax.struct.PyTreeNode):
  """What prefill emits for its slot; the fields of StepOutput, for one token."""

  token: jax.Array  # i32[]
  logprob: jax.Array  # f32[]
  top_token: jax.Array  # i32[X]
  top_logprob: jax.Array  # f32[X]
  rank: jax.Array  # i32[]
  finished: jax.Array  # bool[]
  failed: jax.Array  # bool[], there is no token


class PromptScores(flax.struct.PyTreeNode):
  """Tokens that follow those of a prefill's chunk, under the raw logits there; T of the program.

  What lies beyond the chunk's tokens means nothing.
  """

  logprob: jax.Array  # f32[T], of each token
  rank: jax.Array  # i32[T], 1 is the most likely
  top_token: jax.Array  # i32[T, X]
  top_logprob: jax.Array  # f32[T, X]
  broken: jax.Array  # bool[T], the logits are NaN or infinite


class SlotRequest(flax.struct.PyTreeNode):
  """One request as it enters a slot: a row of each field of SpecState that it decides."""

  page_table: jax.Array  # i32[max_pages]
  length: jax.Array  # i32[], whole pages whose contents are there already, in tokens
  limit: jax.Array  # i32[]
  max_draft: jax.Array  # i32[]
  key: jax.Array  # key[]
  sampling: SlotSampling  # without the leading B
