"""A model of GPT-2's size (124M) on OpenWebText, with nanoGPT's recipe, on one GPU or several.

    python train.py config/train_gpt2.py

About 0.5M tokens per iteration; 600,000 iterations are 300B tokens. nanoGPT's own model reaches a
validation loss of about 2.85 with this recipe. We have not run this config to the end.
"""

out_dir = "out-gpt2"
wandb_run_name = "gpt2-124M"

batch_size = 12
block_size = 1024
gradient_accumulation_steps = 40

max_iters = 600000

eval_interval = 1000
eval_iters = 200
log_interval = 10

weight_decay = 1e-1
