"""What the gRPC and the HTTP door share: requests to the engine, answers as deltas."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from jspec import (
  AsyncLLM,
  FieldError,
  RequestOutput,
  SamplingParams,
)
from jspec.serving.metrics import Metrics
from jspec.serving.shares import Shares

# What a model's generation_config.json sets for requests that don't say.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def any_seed(seed: int | None) -> int | None:
  """A client's 64-bit number as a seed; -1 is none, as in vLLM, and other negative ones wrap."""
  return None if seed is None or seed == -1 else seed % 2**63


def num_tokens(output: RequestOutput) -> int:
  """Generated, of all outputs; of a delta the new ones."""
  return sum(len(out.token_ids) for out in output.outputs)


def model_defaults(params: SamplingParams) -> dict[str, Any]:
  """LLM.get_default_sampling_params as fields for requests that leave them out."""
  return {name: getattr(params, name) for name in MODEL_DEFAULTS}


@dataclasses.dataclass(frozen=True)
class Conversation:
  """Messages, and how a chat template is to write them; see LLM.encode_chat."""

  messages: Sequence[Mapping[str, Any]]
  add_generation_prompt: bool = True
  continue_final_message: bool = False
  chat_template_kwargs: Mapping[str, Any] | None = None
  tools: Sequence[Mapping[str, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Policy:
  """What a server does with every request, by its operator's choice.

  Args:
    strict: fields that nobody knows are refused over HTTP, instead of passed over.
    defaults: sampling parameters of requests that leave them out.
    chat_template: in place of the model's own.
    plain_message_content: control tokens in the contents of messages are text like any other.
    show_cached_tokens: answers say how much of a prompt the prefix cache had, which tells a client
      what others have asked.
    client_priority: requests may have a priority; else all are first come, first served.
    max_outputs_per_client, max_tokens_per_client: see Shares.
    access_log: a line for each request.
  """

  strict: bool = False
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  chat_template: str | None = None
  plain_message_content: bool = True
  show_cached_tokens: bool = False
  client_priority: bool = False
  max_outputs_per_client: int | None = None
  max_tokens_per_client: int | None = None
  access_log: bool = True


@dataclasses.dataclass(frozen=True)
class Caller:
  """Who asks, and how the log names the request.

  Args:
    client: has a share of the queue; the same for all requests with one key, or of one address.
  """

  client: str = ""
  request_id: str | None = None


class Service:
  """An engine under the name by which clients know its model.

  Args:
    engine: takes the requests. model_name: as answers and ModelInfo show it. aliases: other names
      by which clients may ask for it.
  """

  def __init__(self, engine: AsyncLLM, model_name: str, metrics: Metrics,
               policy: Policy | None = None, aliases: Sequence[str] = ()):
    self.engine, self.model_name, self.metrics = engine, model_name, metrics
    self.policy = policy or Policy()
    self.shares = Shares(self.policy.max_outputs_per_client, self.policy.max_tokens_per_client)
    self.model_names = tuple(dict.fromkeys((model_name, *aliases)))

  async def encode_chat(self, chat: Conversation) -> list[int]:
    """The prompt of a conversation; ValueError where the template refuses it.

    In a thread: a long text takes a while, and other requests go on.
    """
    try:
      return await asyncio.to_thread(
          self.engine.llm.encode_chat, chat.messages, chat.add_generation_prompt,
          continue_final_message=chat.continue_final_message,
          chat_template=self.policy.chat_template,
          chat_template_kwargs=chat.chat_template_kwargs, tools=chat.tools,
          plain_content=self.policy.plain_message_content)
    except RecursionError:
      raise FieldError("messages",
                       "the chat template cannot write what is nested so deeply") from None

  async def stream(self, prompt: str | Sequence[int], params: SamplingParams, *,
                   request_id: str | None = None, priority: int = 0, cache_salt: str | None = None,
                   caller: Caller = Caller(), queued: Callable[[], None] | None = None
                   ) -> AsyncGenerator[RequestOutput, None]:
    """The request's deltas; the last one is finished.

    Raises what AsyncLLM.deltas raises. Leaving it ends the request. queued: called once the
    engine has taken it.
    """
    with (self.metrics.request(params) as observe,
          self.shares.request(caller.client, params.n) as take_tokens):
      if priority and not self.policy.client_priority:
        raise FieldError("priority", f"priority={priority} is not for clients to choose here: "
                         "requests are first come, first served (--scheduling-policy fcfs)")
      deltas = self.engine.deltas(
          prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt,
          admit=lambda group: take_tokens(group.most_tokens), queued=queued)
      async with contextlib.aclosing(deltas):  # leaving it is what frees the slot
        async for delta in deltas:
          observe(delta)
          yield delta

  async def complete(self, prompt: str | Sequence[int], params: SamplingParams, *,
                     request_id: str | None = None, priority: int = 0,
                     cache_salt: str | None = None,
                     caller: Caller = Caller()) -> RequestOutput:
    """The whole output."""
    stream = self.stream(prompt, params, request_id=request_id, priority=priority,
                         cache_salt=cache_salt, caller=caller)
    async with contextlib.aclosing(stream):
      return RequestOutput.joined([delta async for delta in stream])
