"""Evaluate Qwen3-0.6B-Base as a baseline: its loss on a data set made with its own tokenizer.

    python data/text/prepare.py --input=FILES --tokenizer=hf:Qwen/Qwen3-0.6B-Base \\
        --out=data/qwen3_600m
    python train.py config/eval_qwen3_600m.py
"""

out_dir = "out-eval-qwen3_600m"
init_from = "Qwen/Qwen3-0.6B-Base"
dataset = "qwen3_600m"
eval_only = True

batch_size = 8
gradient_accumulation_steps = 1
block_size = 1024
eval_iters = 500
