"""LLM: the public Python API, in the shape vLLM users know."""

from __future__ import annotations

import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jspec.build import Parts, build_engine, placed
from jspec.checkpoints import hub, load_head
from jspec.config import EngineConfig, ModelConfig, vllm_arguments
from jspec.config.checks import FieldError
from jspec.config.speculative_parse import parse_speculative
from jspec.engine.limits import (
  check_characters,
  check_priority,
  check_prompt,
  check_request,
  check_tokenizer,
  truncated_prompt,
)
from jspec.engine.loop import MAX_STEPS, Engine
from jspec.engine.metrics import Metric, metrics_of
from jspec.engine.placement import place, use_compilation_cache
from jspec.engine.replicas import Replicas
from jspec.engine.request import Group, Request, failure
from jspec.engine.slot_sampling import row_inputs
from jspec.outputs import RequestOutput
from jspec.sampling_params import MAX_SEED, SamplingParams
from jspec.text.chat_template import strings
from jspec.text.prompt import (
  Messages,
  Prompt,
  check_params,
  listed_conversations,
  listed_params,
  listed_prompts,
  read_prompt,
)
from jspec.text.tokenizer import Tokenizer


class LLM:
  """A model ready to generate.

  Args:
    model: a folder in Hugging Face format, a GGUF file, a Hugging Face repo id, the name of an
      embedded model (`jspec models`), or a loaded hub.LoadedModel, whose weights are then shared.
    speculative_config: vLLM's keys (method, model, num_speculative_tokens, prompt_lookup_max,
      ...); None decodes plainly. The flags from before it (speculative_model="[ngram]", ...) are
      taken as keyword arguments.
    dtype: "float32", "bfloat16", or "auto": float32 on CPU, bfloat16 elsewhere.
    max_model_len: longest prompt + output, tokens; "auto" (in vLLM also None and -1): as long as
      the model was made for.
    max_num_seqs: requests run side by side.
    page_size: tokens of a page of the KV cache.
    num_pages: of the KV cache; 0 has room for every slot at max_model_len.
    kv_cache_dtype: "auto" is the model's; "int8", "fp8" ("fp8_e4m3") and "fp8_e5m2" keep keys and
      values in 8 bits with a scale for each head and position.
    tensor_parallel_size: devices that share the weights and the heads. A draft model lies whole on
      each of them, or is shared too (draft_tensor_parallel_size in speculative_config).
    data_parallel_size: groups of that many devices, each with its share of the slots and pages.
    attention_backend: "auto", or one of config.ATTENTION_BACKENDS, which is then used or refused.
    numerics: "bitwise" makes a token's logits independent of the verification width, so that
      speculation changes not even near-ties, in float32 and bfloat16; costs up to a quarter of
      plain decoding speed in float32 on CPU. "fast" leaves that to rounding.
    enable_prefix_caching: full pages of a text are kept, as long as there is room, for requests
      that begin alike.
    max_num_batched_tokens: of prompts, between two steps of the requests that are being answered.
    dynamic_speculation: step times are measured, and decide how much is drafted and verified, down
      to nothing while drafts don't pay. Statistics then depend on the machine's load, texts don't.
    seed: of the requests that have none of their own.
    revision: of a Hugging Face repo id, a branch, tag or commit.
    cache_dir: for downloaded models and compiled programs; None is the user's cache folder.
    progress: show progress bars; None decides by the terminal.
    older_flags: of speculation; and vLLM's arguments that jspec has not: those that change nothing
      pass, with a warning where they are not at their defaults (jspec/config/vllm_arguments.py).

  Raises:
    ValueError: for anything that cannot be done exactly as asked, before work is lost.
  """

  def __init__(self, model: str | pathlib.Path | hub.LoadedModel = "smollm2-135m-instruct", *,
               speculative_config: Mapping[str, Any] | None = None, dtype: str = "auto",
               max_model_len: int | str | None = 2048, max_num_seqs: int = 8, page_size: int = 128,
               num_pages: int = 0, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1,
               data_parallel_size: int = 1, attention_backend: str = "auto",
               numerics: str = "fast", revision: str | None = None,
               enable_prefix_caching: bool = True,
               max_num_batched_tokens: int = 512, dynamic_speculation: bool = False, seed: int = 0,
               cache_dir: str | pathlib.Path | None = None, progress: bool | None = None,
               **older_flags: Any):
    vllm_arguments.take(older_flags)
    own = hub.name_of(model, revision)
    self.speculative = parse_speculative(
        dict(speculative_config) if speculative_config is not None else None, older_flags,
        lambda *named: None if named == own else load_head.detect_method(*named))
    target_drafts = own == hub.name_of_draft(self.speculative, own)
    if dtype == "auto":
      dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    auto = max_model_len in ("auto", None, -1)
    fields: dict[str, Any] = dict(
        dtype=dtype, max_model_len=2048 if auto else max_model_len, max_num_seqs=max_num_seqs,
        page_size=page_size, num_pages=num_pages, kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size, data_parallel_size=data_parallel_size,
        attention_backend=attention_backend, numerics=numerics, seed=seed,
        enable_prefix_caching=enable_prefix_caching,
        max_num_batched_tokens=max_num_batched_tokens, dynamic_speculation=dynamic_speculation)
    # Refuse bad values before a model is loaded.
    placements = place(EngineConfig(**fields), jax.default_backend(),
                       self.speculative.draft_tensor_parallel_size)
    use_compilation_cache(hub.cache_folder(cache_dir) / "compiled")
    load = lambda name, revision, placer: hub.load_model(
        name, dtype=dtype, cache_dir=cache_dir, progress=progress, placer=placer, revision=revision)
    self.loaded = placed(model, placements[0].target) if isinstance(
        model, hub.LoadedModel) else load(model, revision, placements[0].target)
    self.config: ModelConfig = self.loaded.config
    if auto:
      fields["max_model_len"] = self.config.max_positions
    self.tokenizer = self.loaded.tokenizer
    check_tokenizer(self.tokenizer, self.config.vocab_size)
    given = self.loaded.params["embed"].dtype
    if given != jnp.dtype(dtype):
      raise ValueError(f"{dtype=} was asked for, but the loaded model is {given}")
    spec = self.speculative
    parts = Parts(
        self.loaded, spec, target_drafts,
        lambda name, placer: load(name, spec.revision, placer),
        lambda name, put, params: load_head.load_head(
            name or "", self.config, method=spec.parts[-1], dtype=dtype, progress=progress, put=put,
            revision=spec.revision, target_params=params))
    engines = [build_engine(parts, devices, fields) for devices in placements]
    self._engine_config = engines[0].config
    self._max_num_seqs = max_num_seqs
    self.engine: Engine | Replicas = engines[0] if len(engines) == 1 else Replicas(engines)
    self._names, self._numbers = itertools.count(), itertools.count(1)

  # ------------------------------------------------------------ generating

  def generate(self, prompts: Prompt | Iterable[Prompt],
               sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
               use_tqdm: bool | Callable[..., Any] = False) -> list[RequestOutput]:
    """Completes each prompt; results in the order of the prompts.

    A request that fails while it runs has finish_reason "error", and says why as its stop_reason.

    Args:
      prompts: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; or many of them. A
        dict may have a "cache_salt", see prepare.
      sampling_params: of all prompts, or of each.
      use_tqdm: whether to show a progress bar, or what makes one.
    """
    done: dict[str, RequestOutput] = {}
    requests = self._requests(prompts, sampling_params)
    make_bar = use_tqdm if callable(use_tqdm) else tqdm
    with make_bar(total=len(requests), disable=not use_tqdm, unit="prompt") as bar:
      for output in self._run(requests, MAX_STEPS, batch=True):
        if output.finished:
          done[output.request_id] = output
          bar.update()
    return [done[group.request_id] for group in requests]

  def chat(self, messages: Messages | Iterable[Messages],
           sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
           use_tqdm: bool | Callable[..., Any] = False, *, add_generation_prompt: bool = True,
           continue_final_message: bool = False, chat_template: str | None = None,
           chat_template_kwargs: Mapping[str, Any] | None = None,
           tools: Sequence[Mapping[str, Any]] | None = None,
           plain_content: bool = True) -> list[RequestOutput]:
    """Answers each conversation, a list of {"role", "content"}, through the chat template.

    The other arguments are encode_chat's.
    """
    prompts = [self.encode_chat(
        conversation, add_generation_prompt, continue_final_message=continue_final_message,
        chat_template=chat_template, chat_template_kwargs=chat_template_kwargs, tools=tools,
        plain_content=plain_content) for conversation in listed_conversations(messages)]
    return self.generate(prompts, sampling_params, use_tqdm)

  def stream(self, prompts: Prompt | Iterable[Prompt],
             sampling_params: SamplingParams | Iterable[SamplingParams] | None = None
             ) -> Iterator[RequestOutput]:
    """Like generate, but yields snapshots, of any request in any order, as text appears."""
    return self._run(self._requests(prompts, sampling_params), 1, batch=False)

  def as_completed(self, prompts: Prompt | Iterable[Prompt],
                   sampling_params: SamplingParams | Iterable[SamplingParams] | None = None
                   ) -> Iterator[RequestOutput]:
    """Like generate, but yields each finished output as soon as it is there and forgets it.

    The request_ids count on in the order of the prompts; those of a new LLM begin at "0".
    """
    return self._finished(self._requests(prompts, sampling_params))

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    """The text's token ids; ValueError where they cannot fit max_model_len."""
    check_characters(len(text), self.tokenizer, self.max_model_len)
    return self.tokenizer.encode(text, add_special_tokens)

  def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The tokens' text; ValueError for one that the vocabulary has not."""
    for token in ids:
      if not 0 <= token < self.config.vocab_size:
        raise ValueError(f"token {token} is not in the vocabulary of {self.config.vocab_size} "
                         "tokens")
    return self.tokenizer.decode(ids, skip_special_tokens)

  def encode_chat(self, messages: Messages, add_generation_prompt: bool = True, *,
                  continue_final_message: bool = False, chat_template: str | None = None,
                  chat_template_kwargs: Mapping[str, Any] | None = None,
                  tools: Sequence[Mapping[str, Any]] | None = None,
                  plain_content: bool = True) -> list[int]:
    """The messages' token ids, through the chat template.

    Args:
      add_generation_prompt: the template opens the answer.
      continue_final_message: the answer goes on with the final message instead.
      chat_template: in place of the model's own.
      chat_template_kwargs: variables for the template, such as enable_thinking.
      tools: descriptions of functions; refused where the template does not read them.
      plain_content: "<|im_end|>" in a message is text like any other, and no control token.
    """
    given = (messages, chat_template_kwargs, tools)
    check_characters(sum(map(len, strings(given))), self.tokenizer, self.max_model_len)
    return self.tokenizer.apply_chat_template(
        messages, add_generation_prompt, continue_final_message=continue_final_message,
        chat_template=chat_template, chat_template_kwargs=chat_template_kwargs, tools=tools,
        plain_content=plain_content)

  def get_tokenizer(self) -> Tokenizer:
    return self.tokenizer

  def get_metrics(self) -> list[Metric]:
    """What the engine has done since its start: vLLM's names, under the prefix jspec."""
    return metrics_of(self.engine.stats())

  def reset_prefix_cache(self) -> bool:
    """Forgets what earlier requests left: their pages, and their outputs to draft from (suffix).

    False, and nothing is done, while requests run or wait.
    """
    if self.engine.busy:
      return False
    self.engine.forget()
    return True

  def warm_up(self, progress: bool | None = None) -> None:
    """Compiles every program, so that no request waits for it; measures steps where they count.

    progress: a bar; None decides by the terminal. For an LLM that has no requests.
    """
    hide = None if progress is None else not progress  # None: unless on a terminal
    with tqdm(self.engine.warm_up(), disable=hide, unit="program", desc="compiling") as bar:
      for what in bar:
        bar.set_postfix_str(what)

  def get_default_sampling_params(self) -> SamplingParams:
    """Those of the model's generation_config.json, which a server applies and `generate` does not.
    """
    defaults: dict[str, Any] = dict(self.loaded.generation_defaults)
    return SamplingParams(**defaults)

  @property
  def max_num_seqs(self) -> int:
    """Requests that run side by side."""
    return self._max_num_seqs

  @property
  def max_model_len(self) -> int:
    """The longest prompt and output, tokens."""
    return self._engine_config.max_model_len

  # --------------------------------------------------------------- inside

  def _requests(self, prompts, sampling_params) -> list[Group]:
    """Checks everything before anything runs."""
    listed = listed_prompts(prompts)
    return [self.prepare(*pair) for pair in zip(
        listed, listed_params(sampling_params, len(listed)), strict=True)]

  def prepare(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None,
              priority: int = 0, cache_salt: str | None = None) -> Group:
    """A prompt and its params as requests for the engine; ValueError if they cannot be served.

    cache_salt: the prefix cache is shared with requests of the same one only (None: of none), so
      that who doesn't know it can't tell by the time it takes what others have asked.
    """
    added = time.perf_counter()
    check_params(params)
    given = read_prompt(prompt, cache_salt)
    check_priority(priority)
    if request_id is not None and not isinstance(request_id, str):
      raise FieldError("request_id", f"request_id must be a string, got {request_id!r:.60}")
    ids = tuple(self.encode(given.text or "")) if given.ids is None else given.ids
    ids = truncated_prompt(ids, params, self.max_model_len)
    limit = check_request(params, len(ids), self._engine_config, self.engine.drafter.max_depth)
    check_prompt(ids, self.config.vocab_size)
    row = row_inputs(params, self.tokenizer, self.config.vocab_size)
    name = str(next(self._names)) if request_id is None else request_id
    requests = []
    for i in range(params.n):
      seed = None if params.seed is None else (params.seed + i) % (MAX_SEED + 1)
      # The prompt is the same for all: what the first one learns of it will do.
      own = params.clone(seed=seed, prompt_logprobs=None) if i else params
      requests.append(Request(name, i, ids, own, limit, self.tokenizer, row, next(self._numbers),
                              priority, given.cache_salt, added))
    return Group(name, given.text, requests)

  def _finished(self, groups: list[Group]) -> Iterator[RequestOutput]:
    running = {group.request_id: group for group in groups}
    for output in self._run(groups, MAX_STEPS, batch=True):
      if output.finished:
        requests = running.pop(output.request_id).requests
        for request in requests:
          request.hidden_states = None  # some megabytes each, which only the output keeps now
        requests.clear()
        yield output

  def _snapshot(self, group: Group) -> RequestOutput | None:
    """Of a request with news."""
    try:
      return group.output() if group.news() else None
    except Exception as error:  # whatever it is, the others' outputs are to come
      for request in group.requests:
        self.engine.fail(request, failure(error))
      return group.failure(failure(error))

  def _run(self, groups: list[Group], num_steps: int,
           batch: bool) -> Iterator[RequestOutput]:
    try:
      for group in groups:
        for request in group.requests:
          self.engine.add(request)
      running = list(groups)
      while running:
        # Somebody else's turn of the engine may have brought these requests forward, too.
        if any(not r.finished for group in running for r in group.requests):
          self.engine.step(num_steps, batch)
        for group in list(running):
          output = self._snapshot(group)
          if output is not None:
            if output.finished:
              running.remove(group)
            yield output
    finally:  # an error, or a reader that stopped reading
      for group in groups:
        for request in group.requests:
          if not request.finished:
            self.engine.abort(request)
