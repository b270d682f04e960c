"""Bearer tokens, checked in a time that says nothing about them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence


class Tokens:
  """The tokens that open a server's doors. Without any, everybody may come in."""

  def __init__(self, tokens: Sequence[str]):
    if isinstance(tokens, str):
      raise ValueError("tokens must be a list of strings, got one string")
    for i, token in enumerate(tokens):
      if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"token {i} must be of visible ASCII characters, without a space")
    self._digests = [_digest(token) for token in tokens]

  def client(self, header: str | None) -> str | None:
    """A name for who has the token of such a header, which tells nothing of it; None without any
    tokens, or for one that is none of them."""
    token = (header or "").partition(" ")[2].strip(" ")
    return _digest(token).hex()[:16] if self._digests and self.allows(header) else None

  def allows(self, header: str | None) -> bool:
    """Whether an `Authorization: Bearer TOKEN` header holds one of the tokens."""
    if not self._digests:
      return True
    scheme, _, token = (header or "").partition(" ")
    given = _digest(token.strip(" "))
    # Digests are of one length, and all are compared whatever the first ones gave.
    matches = [hmac.compare_digest(given, digest) for digest in self._digests]
    return any(matches) and scheme.lower() == "bearer"


def _digest(token: str) -> bytes:
  return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
