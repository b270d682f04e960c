"""An EAGLE-3 head for SmolLM2-135M-Instruct: first one step of training-time test, then two.

Its data is made first, see docs/training.md:
  jspec train-data --prompts PROMPTS --output runs/smollm2/data --features 2 15 27 30
The second stage starts from the first one's head:
  jspec train --config training/configs/eagle3_smollm2.py output=runs/smollm2/eagle3b \
    init_from=runs/smollm2/eagle3/head options.steps=2 epochs=1.0 optimizer.learning_rate=5e-4
The head that comes with jspec took other epochs and data.learn: its card has the commands.
"""

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
