"""EAGLE from the equations: plain numpy loops over explicit lists of pairs, nothing of jspec's.

An `Entry` is one (feature, token) pair that went through the head, with its keys and values; what
it sees is a Python list of other entries. `BUGS` are mistakes that are easily made: an Oracle with
one of them must disagree with the drafter.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

BUGS = ("concat", "tap", "feedback", "target_id", "shift", "index_0", "rerank", "position")


@dataclasses.dataclass
class Entry:
  keys: list  # one per layer, [K, h]
  values: list
  back: np.ndarray  # what is fed back [E]
  logits: np.ndarray  # [Vd]


class Oracle:
  """One text: its tokens, the target's hidden states at each of them, and one head.

  config, target: the fields of EagleConfig and ModelConfig, read only. taps: the hidden states
  that make the feature. hidden: [positions, num_layers + 1, width].
  """

  def __init__(self, config, target, params, token, hidden, taps, bug=None):
    to_numpy = lambda x: {k: to_numpy(v) for k, v in x.items()} if isinstance(x, dict) else (
        [to_numpy(v) for v in x] if isinstance(x, list) else np.asarray(x))
    self.config, self.layer, self.target, self.bug = config, config.layer, target, bug
    self.head, self.shared = to_numpy(params["head"]), to_numpy(params["target"])
    self.token, self.hidden = token, hidden
    self.taps = [t - 1 for t in taps] if bug == "tap" else taps

  # ------------------------------------------------------------------ the head

  def norm(self, x, p):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean() + self.layer.norm_eps) * p["scale"]

  def matrix(self, x, p):
    y = x.astype(np.float64) @ p["w"].astype(np.float64)
    return y + p["b"] if "b" in p else y

  def feature(self, position):
    """The target's feature at a position, as the head takes it."""
    taps = [self.hidden[position, t].astype(np.float64) for t in self.taps]
    if self.config.version == 1:
      return taps[0]
    if self.config.fc_norm:
      taps = [self.norm(x, p) for x, p in zip(taps, self.head["fc_norm"], strict=True)]
    x = np.concatenate(taps)
    if self.config.norm_before_fc:
      x = self.norm(x, self.head["fc_norm"])
    return self.matrix(x, self.head["fc"])

  def rotated(self, x, position):
    """[heads, h], the pairs (i, i + h/2) turned by position * theta^(-2i/h)."""
    half = x.shape[-1] // 2
    out = x.copy()
    for i in range(half):
      angle = position * self.layer.rope_theta ** (-2 * i / x.shape[-1])
      out[:, i] = x[:, i] * np.cos(angle) - x[:, i + half] * np.sin(angle)
      out[:, i + half] = x[:, i + half] * np.cos(angle) + x[:, i] * np.sin(angle)
    return out

  def entry(self, token, feature, position, seen) -> Entry:
    """Runs the pair on top of the entries it sees."""
    c, layer = self.config, self.layer
    table = self.head["embed"] if c.has_embed else self.shared["embed"]
    x = table[token].astype(np.float64)
    if c.version == 1:
      pair = (feature, x) if self.bug == "concat" else (x, feature)
      residual = first = self.matrix(np.concatenate(pair), self.head["fc"])
    else:
      p = self.head["layers"][0]
      x, normed = self.norm(x, p["embed_norm"]), self.norm(feature, p["feature_norm"])
      first = np.concatenate((normed, x) if self.bug == "concat" else (x, normed))
      residual = normed if c.norm_before_residual else feature
    keys, values = [], []
    for i, p in enumerate(self.head["layers"]):
      y = first if i == 0 else self.norm(residual, p["attn_norm"])
      q, k, v = (self.matrix(y, p[name]).reshape(-1, layer.head_dim) for name in "qkv")
      keys.append(self.rotated(k, position))
      values.append(v)
      ks = [e.keys[i] for e in seen] + [keys[i]]
      vs = [e.values[i] for e in seen] + [v]
      q = self.rotated(q, position)
      heads = []
      for h in range(layer.num_heads):
        kv = h // (layer.num_heads // layer.num_kv_heads)
        scores = np.array([q[h] @ k[kv] for k in ks]) / np.sqrt(layer.head_dim)
        weight = np.exp(scores - scores.max())
        heads.append(sum(w * v[kv] for w, v in zip(weight / weight.sum(), vs, strict=True)))
      residual = residual + self.matrix(np.concatenate(heads), p["o"])
      y = self.norm(residual, p["mlp_norm"])
      gate = self.matrix(y, p["gate"])
      y = gate / (1 + np.exp(-gate)) * self.matrix(y, p["up"])
      residual = residual + self.matrix(y, p["down"])
    out = residual if c.version == 1 else self.norm(residual, self.head["final_norm"])
    logits = self.matrix(out, self.head["head"] if c.has_head else self.shared["head"])
    back = out if c.norm_output != (self.bug == "feedback") else residual
    return Entry(keys, values, back, logits)

  def in_target(self, token):
    if "target_id" not in self.head or self.bug == "target_id":
      return int(token)
    return int(self.head["target_id"][token])

  # ------------------------------------------------------------------ the trees

  def committed(self, length):
    """Entries of the pairs at 1 .. length - 1."""
    seen: list[Entry] = []
    if self.bug == "index_0":
      zero = np.zeros((1, *self.hidden.shape[1:]))
      self.hidden = np.concatenate([self.hidden, zero])  # at -1
      seen = [self.entry(self.token[0], self.feature(-1), 0, [])]
    for i in range(1, length):
      before = i if self.bug == "shift" else i - 1
      seen = [*seen, self.entry(self.token[i], self.feature(before), i, seen)]
    return seen

  def root(self, root, length):
    """(entries of the text, the root's own)."""
    seen = self.committed(length)
    return seen, self.entry(root, self.feature(length - 1), length, seen)

  def fixed(self, root, length, paths, temperature=0.0, uniforms=None, confidence=0.0):
    """The tree of the given paths of ranks: {path: (target token, its law over the target's V)}.

    uniforms: None for greedy drafts; else by level [n, width] for the n nodes that have children.
    """
    ordered = sorted(((), *map(tuple, paths)), key=lambda p: (len(p), p))
    seen, first = self.root(root, length)
    entries, above = {(): first}, {(): []}
    tokens: dict[tuple, Any] = {}
    for level in range(max(map(len, ordered))):
      having = [p for p in ordered if len(p) == level and any(q[:-1] == p for q in ordered if q)]
      for n, path in enumerate(having):
        if path and path not in tokens:  # the chain stopped above
          continue
        if path:
          up = entries[path[:-1]]
          above[path] = [*above[path[:-1]], up]
          at = length + (0 if self.bug == "position" else level)
          entries[path] = self.entry(tokens[path][0], up.back, at, seen + above[path])
        logits = entries[path].logits
        p = np.exp(logits - logits.max())
        if (p / p.sum()).max() < confidence:
          continue
        ranks = [q[-1] for q in ordered if len(q) == level + 1 and q[:-1] == path]
        u = None if uniforms is None else uniforms[level][n]
        for rank, (token, law) in enumerate(self.drawn(logits, max(ranks) + 1, temperature, u)):
          if rank in ranks:
            tokens[(*path, rank)] = (self.in_target(token), law)
    return tokens

  def drawn(self, logits, width, temperature, u):
    """`width` different draft tokens, each with the law it was drawn from, over the target's V."""
    left, out = list(range(len(logits))), []
    for i in range(width):
      if u is None or temperature == 0:
        token = max(left, key=lambda j: (logits[j], -j))
        weight = {token: 1.0}
      else:
        top = max(logits[j] for j in left)
        weight = {j: np.exp((logits[j] - top) / temperature) for j in left}
        total, upto = sum(weight.values()), 0.0
        weight = {j: w / total for j, w in weight.items()}
        for token in left:
          upto += weight[token]
          if upto > u[i]:
            break
      law = np.zeros(self.target.vocab_size)
      for j, w in weight.items():
        law[self.in_target(j)] = w
      out.append((token, law))
      left.remove(token)
    return out

  def dynamic(self, root, length, top_k, depth, total_tokens):
    """EAGLE-2: (tokens, parents) of the tree, root first."""
    seen, first = self.root(root, length)
    pool: list[dict] = []  # in the order in which they were found

    def expand(entry, node, above):
      """The top_k children of an entry: of the pool's node, or of the root where it is None."""
      logp = entry.logits - entry.logits.max()
      logp = logp - np.log(np.exp(logp).sum())
      score = 0.0 if node is None else pool[node]["score"]
      found = sorted(range(len(logp)), key=lambda j: (-logp[j], j))[:top_k]
      for j in found:
        pool.append({"score": score + logp[j], "token": self.in_target(j), "parent": node,
                     "entry": entry, "above": above, "id": len(pool)})
      return pool[-top_k:]

    best_first = lambda nodes: sorted(nodes, key=lambda n: (-n["score"], n["id"]))
    frontier = expand(first, None, [first])
    for level in range(1, depth):
      found = []
      for node in frontier:
        at = length + (0 if self.bug == "position" else level)
        entry = self.entry(node["token"], node["entry"].back, at, seen + node["above"])
        found += expand(entry, node["id"], [*node["above"], entry])
      frontier = best_first(found)[:top_k]
    kept = pool if self.bug == "rerank" else best_first(pool)
    kept = sorted(kept[:total_tokens - 1], key=lambda n: n["id"])
    number = {node["id"]: i for i, node in enumerate(kept, 1)} | {None: 0}
    return ([root, *(n["token"] for n in kept)], [-1, *(number[n["parent"]] for n in kept)])


def random_head(config, seed: int, sharpness: float = 2.0) -> dict:
  """Random parameters of an EagleConfig's head: float32, logits of about that deviation."""
  rng, layer = np.random.default_rng(seed), config.layer
  e, target = layer.width, config.target_width

  def matrix(rows, columns, scale=1.0, bias=False):
    w = {"w": (scale * rng.normal(size=(rows, columns)) / np.sqrt(rows)).astype(np.float32)}
    return w | ({"b": rng.normal(size=columns).astype(np.float32) / 4} if bias else {})

  norm = lambda size: {"scale": (1 + rng.normal(size=size) / 4).astype(np.float32)}
  heads, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
  layers = []
  for i in range(layer.num_layers):
    width = 2 * e if i == 0 and config.version == 3 else e
    p = {"q": matrix(width, heads), "k": matrix(width, kv), "v": matrix(width, kv),
         "o": matrix(heads, e), "mlp_norm": norm(e), "gate": matrix(e, layer.mlp_dim),
         "up": matrix(e, layer.mlp_dim), "down": matrix(layer.mlp_dim, e)}
    if i > 0:
      p["attn_norm"] = norm(e)
    elif config.version == 3:
      p |= {"embed_norm": norm(e), "feature_norm": norm(e)}
    layers.append(p)
  fused = 2 * e if config.version == 1 else config.num_taps * target
  head: dict[str, Any] = {"fc": matrix(fused, e, bias=config.version == 1), "layers": layers}
  if config.version == 3:
    head["final_norm"] = norm(e)
  if config.norm_before_fc:
    head["fc_norm"] = norm(fused)
  if config.fc_norm:
    head["fc_norm"] = [norm(target) for _ in range(config.num_taps)]
  known = config.draft_vocab_size or config.vocab_size
  if config.has_head:
    head["head"] = matrix(e, known, sharpness)
  if config.has_embed:
    head["embed"] = rng.normal(size=(config.vocab_size, e)).astype(np.float32) / 2
  if config.draft_vocab_size:
    ids = rng.choice(config.vocab_size, known, replace=False)
    head["target_id"] = np.sort(ids).astype(np.int32)
  return head
