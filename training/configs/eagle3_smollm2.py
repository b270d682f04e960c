"""The EAGLE-3 head that jspec ships for SmolLM2-135M-Instruct: first one step deep, then deeper.

Its card in jspec/shipped_heads has the commands, with what they override here.

Its data is made first, see the README's section on training:
  python -m training.generate --prompts PROMPTS --output runs/smollm2/data --features 2 15 27 30
"""

from training.config import (
  CheckpointConfig,
  DataConfig,
  EvalConfig,
  LogConfig,
  OptimizerConfig,
  TrainConfig,
)

config = TrainConfig(
  target="smollm2-135m-instruct",
  method="eagle3",
  output="runs/smollm2/eagle3",
  options={"steps": 1, "init_layer": 29},
  draft_vocab_size=8192,
  data=DataConfig(shards=("runs/smollm2/data",), validation=0.03, max_length=320, rows=2,
                  row_length=512, features="stored"),
  epochs=5.0,
  optimizer=OptimizerConfig(learning_rate=1e-3, warmup_share=0.03, final_share=0.05,
                            clip_norm=0.5, weight_decay=0.01),
  ema=0.99,
  eval=EvalConfig(every=200, batches=12),
  checkpoint=CheckpointConfig(every=200, keep=2),
  log=LogConfig(every=20, plot=True),
  export_style="compact",
)
