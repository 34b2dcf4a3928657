"""Evaluate SmolLM2-135M as a baseline: its loss on a data set made with its own tokenizer.

    python data/text/prepare.py --input=FILES --tokenizer=hf:HuggingFaceTB/SmolLM2-135M \\
        --out=data/smollm2_135m
    python train.py config/eval_smollm2_135m.py
"""

out_dir = "out-eval-smollm2_135m"
init_from = "HuggingFaceTB/SmolLM2-135M"
dataset = "smollm2_135m"
eval_only = True

batch_size = 8
gradient_accumulation_steps = 1
block_size = 1024
eval_iters = 500
