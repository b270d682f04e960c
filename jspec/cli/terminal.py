"""What a person sees: text as it streams, draft tokens in colour, the summary, the chat loop."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from jspec.outputs import RequestOutput, raise_failure
from jspec.sampling_params import SamplingParams
from jspec.text.tokenizer import Detokenizer, Tokenizer

GREEN, RESET = "\x1b[32m", "\x1b[0m"
_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def warm_up(llm: Any, prompt: list[int], compiled: set[int], seed: int | None = None,
            before: Sequence[int] = ()) -> None:
  """Compiles what this prompt needs, so that its speed can be told from compilation's.

  Args:
    compiled: sizes of prefill programs that are done already; this prompt's are added.
    seed: of the request.
    before: the last text, whose pages may be there still and need not be read again.
  """
  new, page = {}, llm.engine.config.page_size
  same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1],
                                            zip(before, prompt, strict=False)))
  for done in {0, min(same, len(prompt) - 1) // page * page}:
    while done < len(prompt):
      size, count = llm.engine.config.prefill_chunk(len(prompt) - done)
      if size not in compiled:
        new[size] = count
      done += count
  if not new:
    return
  note("[compiling]")
  start = time.perf_counter()
  # Each begins with a token of its own: of what is in the prefix cache nothing would be compiled,
  # and of the prompt nothing may be there.
  first = [token for token in range(len(new) + 1) if token != prompt[0]]
  llm.generate([[token, *prompt[1:count]]
                for token, count in zip(first, new.values(), strict=False)],
               SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, seed=seed))
  compiled.update(new)
  seconds = time.perf_counter() - start
  if seconds > 1:
    note(f"[compiled in {seconds:.1f} s]")


def write_stream(snapshots: Iterable[RequestOutput], tokenizer: Tokenizer, out: TextIO,
                 show_drafts: bool = False) -> RequestOutput:
  """Writes a request's text as it comes and returns its last snapshot.

  With show_drafts a character is green where an accepted draft token completed it.
  """
  output = detokenizer = None
  drafted: list[bool] = []  # per character of the text
  seen = printed = 0  # tokens, characters
  for output in snapshots:
    completion = output.outputs[0]
    if show_drafts:
      detokenizer = detokenizer or Detokenizer(tokenizer, prompt_ids=output.prompt_token_ids)
      flags = completion.drafted[seen:]
      for token, flag in zip(completion.token_ids[seen:], flags, strict=True):
        drafted += [flag] * len(detokenizer.push([token]))
      seen = len(completion.token_ids)
    for piece in _pieces(completion.text, printed, drafted):
      out.write(piece)
    printed = max(printed, len(completion.text))
    out.flush()
  if output is None:
    raise ValueError("the engine returned nothing for this prompt")
  raise_failure(output)
  return output


def _pieces(text: str, start: int, drafted: list[bool]) -> Iterable[str]:
  def from_draft(i: int) -> bool:
    return i < len(drafted) and drafted[i]

  for green, group in itertools.groupby(range(start, len(text)), from_draft):
    piece = "".join(text[i] for i in group)
    yield f"{GREEN}{piece}{RESET}" if green else piece


def summary(output: RequestOutput, speculating: bool) -> list[str]:
  """Speed and acceptance of one finished request, in a line or two."""
  completion, timing, stats = output.outputs[0], output.timing, output.speculation
  count = len(completion.token_ids)
  speed = count / timing.finished if timing.finished > 0 else 0.0
  lines = [f"{count} tokens in {timing.finished:.2f} s: {speed:.1f} tokens/s, first token after "
           f"{timing.first_token:.2f} s, prompt {len(output.prompt_token_ids)} tokens"]
  if not speculating:
    return lines
  if not stats.num_draft_tokens:
    return [*lines, f"nothing was drafted in {stats.num_steps} steps"]
  lines.append(f"drafts: {stats.num_accepted_tokens} of {stats.num_draft_tokens} tokens accepted, "
               f"acceptance rate {stats.acceptance_rate:.0%}, mean acceptance length "
               f"{stats.mean_acceptance_length:.2f}")
  lines.append(f"tokens per step: {stats.tokens_per_step:.2f} over all {stats.num_steps} steps, "
               f"{stats.mean_acceptance_length:.2f} over the {stats.num_drafts} that drafted")
  return lines


def chat(llm: Any, params: SamplingParams, system: str | None, out: TextIO,
         show_drafts: bool = False) -> None:
  """Reads messages and answers them until the input ends or says /exit."""
  start = [{"role": "system", "content": system}] if system else []
  messages = list(start)
  compiled: set[int] = set()
  said: list[int] = []  # the last prompt and its answer
  warm_up(llm, llm.encode_chat([*start, {"role": "user", "content": "Hello"}]), compiled,
          params.seed)
  prompt = ""
  if sys.stdin.isatty():
    prompt = "> "
    with contextlib.suppress(ImportError):  # not on every system
      import readline  # noqa: F401  its import gives input() line editing
  note(_HELP)
  while True:
    try:
      text = input(prompt).strip()
    except EOFError:
      out.write("\n")
      return
    except KeyboardInterrupt:
      note(f"\n{_HELP}")
      continue
    if text in ("/exit", "/quit"):
      return
    if text == "/reset":
      messages = list(start)
      note("started over")
    elif text.startswith("/"):
      note(f"unknown command {text.split()[0]}: {_HELP}")
    elif text:
      messages = _turn(llm, params, [*messages, {"role": "user", "content": text}], out,
                       show_drafts, compiled, said)


def _turn(llm: Any, params: SamplingParams, messages: list[dict[str, str]], out: TextIO,
          show_drafts: bool, compiled: set[int], said: list[int]) -> list[dict[str, str]]:
  """The conversation with the last message answered, or without it if that is impossible."""
  collected = ""
  try:
    messages, prompt = _fitting(llm, params, messages)
    warm_up(llm, prompt, compiled, params.seed, said)

    def watched():
      nonlocal collected
      for output in llm.stream([prompt], params):
        collected = output.text
        said[:] = [*prompt, *output.token_ids]
        yield output

    output = write_stream(watched(), llm.tokenizer, out, show_drafts)
    out.write("\n")
    for line in summary(output, llm.speculative.method != "none"):
      note(f"[{line}]")
    if output.finish_reason == "length":
      note("[cut: the answer reached its limit of tokens]")
  except ValueError as error:
    note(f"jspec: error: {error}")
    return messages[:-1]
  except KeyboardInterrupt:
    out.write("\n")
    note("[stopped]")
    if not collected:
      return messages[:-1]
  return [*messages, {"role": "assistant", "content": collected}]


def _fitting(llm: Any, params: SamplingParams, messages: list[dict[str, str]]):
  """The messages with the oldest turns dropped until an answer has room, and their prompt ids."""
  limit = llm.engine.config.max_model_len
  room = min(params.max_tokens or limit, limit // 4)
  kept, dropped = list(messages), 0
  first = 1 if kept[0]["role"] == "system" else 0
  prompt = llm.encode_chat(kept)
  while len(prompt) + room > limit and len(kept) - first > 2:
    del kept[first:first + 2]  # a question and its answer
    dropped += 1
    prompt = llm.encode_chat(kept)
  if len(prompt) + room > limit:
    raise ValueError(f"this message makes a prompt of {len(prompt)} tokens, which leaves no room "
                     f"for {room} more in a context of {limit}; shorten it or raise "
                     "--max-model-len")
  if dropped:
    turns = "turn was" if dropped == 1 else f"{dropped} turns were"
    note(f"[the context of {limit} tokens is full: the oldest {turns} dropped]")
  return kept, prompt


def note(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
