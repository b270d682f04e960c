"""An LLM without a model: answers with fixed bytes, for tests of what is built on LLM."""

from __future__ import annotations

import types

import tokenizers
import tokenizers.decoders
import tokenizers.models

from jspec.config import EngineConfig
from jspec.config.speculative_parse import parse_speculative
from jspec.outputs import CompletionOutput, RequestOutput, SpeculativeStats, Timing
from jspec.sampling_params import SamplingParams
from jspec.text.tokenizer import _BYTE_OF, Tokenizer

TEMPLATE = ("{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}a:{% endif %}")
END = 256


def byte_tokenizer(chat_template: str | None = TEMPLATE) -> Tokenizer:
  """One token per byte, and token 256 as the end."""
  vocab = {spelled: byte for spelled, byte in _BYTE_OF.items()}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens(["<end>"])
  return Tokenizer(backend, eos_ids=(END,), chat_template=chat_template)


class FakeLLM:
  """Takes LLM's arguments. `reply` is the answer to everything; every other token is a draft."""

  reply = "Hé, 👍!"
  interrupt_after: int | None = None  # tokens, then Ctrl-C
  template: str | None = TEMPLATE
  made: list[FakeLLM] = []

  def __init__(self, model, *, speculative_config=None, dtype="auto", cache_dir=None,
               speculative_model=None, num_speculative_tokens=None, ngram_prompt_lookup_max=None,
               ngram_prompt_lookup_min=None, **engine):
    self.model = model
    self.speculative = parse_speculative(speculative_config, {
      "speculative_model": speculative_model, "num_speculative_tokens": num_speculative_tokens,
      "ngram_prompt_lookup_max": ngram_prompt_lookup_max,
      "ngram_prompt_lookup_min": ngram_prompt_lookup_min})
    self.engine = types.SimpleNamespace(config=EngineConfig(**engine))
    self.tokenizer = byte_tokenizer(self.template)
    self.loaded = types.SimpleNamespace(name=str(model))
    self.prompts: list[list[int]] = []  # of stream()
    self.made.append(self)

  def encode_chat(self, messages, add_generation_prompt=True):
    return self.tokenizer.apply_chat_template(messages, add_generation_prompt)

  def stream(self, prompts, params):
    return self._run(prompts, params)

  def generate(self, prompts, params=None):
    given = [p["prompt_token_ids"] if isinstance(p, dict) else p for p in prompts]
    return [self._output(ids, params or SamplingParams(), None) for ids in given]

  def reset_prefix_cache(self):
    return True

  def _run(self, prompts, params):
    self.prompts += prompts
    for ids in prompts:
      whole = self._output(ids, params, None)
      for i in range(1, len(whole.token_ids)):
        if i == self.interrupt_after:
          raise KeyboardInterrupt
        yield self._output(ids, params, i)
      yield whole

  def _output(self, ids, params, count) -> RequestOutput:
    reply = list(self.reply.encode())
    tokens = (reply[:params.max_tokens] + [END] * (len(reply) < params.max_tokens))[:count]
    text = bytes(t for t in tokens if t != END).decode(errors="ignore")
    drafts = len(tokens) // 2 if self.speculative.method != "none" else 0
    stats = SpeculativeStats(max(1, len(tokens) - drafts), drafts, 2 * drafts, drafts, len(tokens))
    done = None if count is not None else "stop" if END in tokens else "length"
    out = CompletionOutput(0, text, tuple(tokens), done, speculation=stats,
                           drafted=tuple(drafts > 0 and i % 2 == 1 for i in range(len(tokens))))
    return RequestOutput("0", None, tuple(ids), (out,), done is not None, Timing(0.5, 2.0))
