"""Medusa-1 heads for SmolLM2-135M-Instruct, on the data of eagle3_smollm2.py."""

from jspec.training.config import (
  CheckpointConfig,
  DataConfig,
  EvalConfig,
  LogConfig,
  OptimizerConfig,
  TrainConfig,
)

config = TrainConfig(
  target="smollm2-135m-instruct",
  method="medusa",
  output="runs/smollm2/medusa",
  options={"num_heads": 3},
  draft_vocab_size=8192,
  data=DataConfig(shards=("runs/smollm2/data",), validation=0.03, max_length=320, rows=2,
                  row_length=512, features="stored"),
  epochs=1.0,
  optimizer=OptimizerConfig(learning_rate=1e-3, warmup_share=0.1, clip_norm=1.0),
  eval=EvalConfig(every=200, batches=12),
  checkpoint=CheckpointConfig(every=200, keep=2),
  log=LogConfig(every=20, plot=True),
  export_style="vllm",
)
