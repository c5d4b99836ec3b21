"""Train a randomly initialised GPT-2 in the Hugging Face Trainer with the published method.

torchrun --nproc-per-node 2 docs/gpt2_trainer.py
hdet report runs/gpt2 -o report.html
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hdet_scale import HDETConfig
from hdet_scale.hf import HDETCallback
from hdet_scale.models.text import Text, standard_library


def main() -> None:
    context, text = 64, Text.read(standard_library()).train
    rows = [text[i : i + context].long() for i in range(0, 4000 * context, context)]
    torch.manual_seed(0)
    sizes = {"n_positions": context, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))
    hdet = HDETConfig(spread=0.2, interval=10, rule="paper", warmup_steps=20)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir="runs/gpt2",
            max_steps=100,
            learning_rate=2e-3,
            per_device_train_batch_size=8,
            lr_scheduler_type="cosine",
            save_steps=50,
            logging_steps=10,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[HDETCallback(hdet, log="runs/gpt2")],
    )
    trainer.train()


if __name__ == "__main__":
    main()
