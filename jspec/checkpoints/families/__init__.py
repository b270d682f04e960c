"""The registry of model families: what is in no row here is in no other module either."""

from jspec.checkpoints.families import gemma3, llama, mistral, opt, qwen2, qwen3
from jspec.checkpoints.families.family import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (
  llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY, gemma3.FAMILY, opt.FAMILY)}
