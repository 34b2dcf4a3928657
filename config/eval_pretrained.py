r"""Evaluate a pretrained model as a baseline, on a data set made with its own tokenizer.

    python data/text/prepare.py --input=FILES --tokenizer=hf:HuggingFaceTB/SmolLM2-135M \
        --out=data/smollm2
    python train.py config/eval_pretrained.py

For another model, prepare a data set with that model's tokenizer, and pass both names:
--init_from=Qwen/Qwen3-0.6B-Base --dataset=NAME.
"""

out_dir = "out-eval-pretrained"
init_from = "HuggingFaceTB/SmolLM2-135M"
dataset = "smollm2"
eval_only = True

batch_size = 8
gradient_accumulation_steps = 1
block_size = 1024
eval_iters = 500
