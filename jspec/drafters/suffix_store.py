"""Past outputs on the host, and the passages of them that are likeliest to continue a text."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

END = -1  # after each output
# The index finds places by their last three tokens; by the last one where too few are found, as
# at an output's start.
ORDERS = (3, 1)
LOOKS = 64  # places looked at per order
NUM_HEADS = 1 << 20
MAX_BYTES = 256 * 2**20  # of tokens and their index, beside its heads (16 MiB)
_TOKEN_BYTES = 4 + 8 * len(ORDERS)


class SuffixStore:
  """First in, first out: the last max_requests outputs that fit max_bytes, without their prompts.

  The index is that of zlib's deflate: places of equal hash are linked, latest first, in arrays of
  a fixed size per token. A place is the number of tokens stored before it, ever.
  """

  def __init__(self, max_requests: int, max_match: int, num_windows: int, window_len: int,
               max_bytes: int = MAX_BYTES):
    if window_len <= max_match:
      raise ValueError(f"{window_len=} must exceed {max_match=}: a passage holds what follows, too")
    self.max_requests, self.max_match = max_requests, max_match
    # What is forgotten lies beside what counts until it is half of all.
    self.max_tokens = max_bytes // _TOKEN_BYTES // 2
    if self.max_tokens < 2:
      raise ValueError(f"{max_bytes=} must be at least {4 * _TOKEN_BYTES}")
    self.num_windows, self.window_len = num_windows, window_len
    self.clear()

  def clear(self) -> None:
    self._token = array("i")
    self._before = [array("q") for _ in ORDERS]  # the last place with the same hash
    self._latest = [array("q", [END]) * NUM_HEADS for _ in ORDERS]
    self._lengths: deque[int] = deque()  # of the outputs, END included
    self._oldest = 0  # place of the first token that counts
    self._start = 0  # place of the first token still held

  def add(self, output: Sequence[int]) -> None:
    if not output or not self.max_requests:
      return
    text = array("i", output[-(self.max_tokens - 1):])  # of a text that is too long, its end
    place = self._start + len(self._token)
    self._token += text
    self._token.append(END)
    for order, before, latest in zip(ORDERS, self._before, self._latest, strict=True):
      grams = zip(*(text[i:] for i in range(order)), strict=False)
      heads = [hash(gram) % NUM_HEADS for gram in grams]
      before.extend([END] * min(order - 1, len(text)))
      for at, head in enumerate(heads, place + order - 1):
        before.append(latest[head])
        latest[head] = at
      before.append(END)
    self._lengths.append(len(text) + 1)
    while len(self._lengths) > self.max_requests or (
        self._start + len(self._token) - self._oldest > self.max_tokens):
      self._oldest += self._lengths.popleft()
    self._forget()

  def passages(self, text: Sequence[int]) -> list[list[int]]:
    """At most num_windows runs of past outputs that the end of `text` leads into, latest first.

    Each starts with the tokens that match, has at least one more and at most window_len in all.
    The longest matches win, then the latest; no two passages share a token's place.
    """
    suffix = [int(token) for token in text[-self.max_match:]]
    spans: list[tuple[int, int]] = []
    for which, order in enumerate(ORDERS):
      if len(spans) == self.num_windows:
        break
      for length, at in sorted(self._matches(suffix, which, order), reverse=True):
        span = self._span(at + 1 - length)
        if all(end <= span[0] or span[1] <= start for start, end in spans):
          spans.append(span)
          if len(spans) == self.num_windows:
            break
    return [self._token[start - self._start:end - self._start].tolist()
            for start, end in sorted(spans, reverse=True)]

  def _matches(self, suffix: list[int], which: int, order: int) -> Iterator[tuple[int, int]]:
    """(tokens that match, place of the last) where `order` or more match and more follows."""
    if len(suffix) < order:
      return
    token, before, start = self._token, self._before[which], self._start
    at = self._latest[which][hash(tuple(suffix[-order:])) % NUM_HEADS]
    for _ in range(LOOKS):
      if at < self._oldest:
        return
      i, length = at - start, 0
      for wanted in reversed(suffix):
        if length > i or token[i - length] != wanted:
          break
        length += 1
      if length >= order and token[i + 1] != END:
        yield length, at
      at = before[i]

  def _span(self, start: int) -> tuple[int, int]:
    """The passage that begins there: the places of its first token and after its last."""
    first = start - self._start
    run = self._token[first:first + self.window_len]
    return start, start + (run.index(END) if END in run else len(run))

  def _forget(self) -> None:
    """Drops what no longer counts once it is half of all: each token is moved once on average."""
    gone = self._oldest - self._start
    if 2 * gone > len(self._token):
      for tokens in (self._token, *self._before):
        del tokens[:gone]
      self._start = self._oldest
