"""The peer of online.py: TRL's GRPOTrainer with the same model, prompts, checker and number of answers.

benchmarks/methods.py makes the records and starts it, in an environment of its own: `pip install
torch==2.13.0 trl==1.16.0 peft`.

- LoRA of rank 16 on all linear layers of the blocks, bf16, as our runs have it.
- As online.py's iterations: `answers` sampled answers by one policy, then steps of `batch` of them.
- The reward is 1 where the checker of examples/instructions.py accepts an answer, else 0. The checker
  runs in our environment, as the process `judge`.
- It writes `final`, a Hugging Face folder with the adapters merged in.
"""

import json
import subprocess
import sys
from pathlib import Path

import datasets
import torch
import transformers
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def main(spec: dict) -> None:
    """spec: what methods.py's run() hands over."""
    datasets.disable_progress_bars()
    out = Path(spec["out"])
    rows = [json.loads(line) for line in Path(spec["prompts"]).read_text().splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec["model"])
    pipe = subprocess.PIPE
    judge = subprocess.Popen(spec["judge"], stdin=pipe, stdout=pipe, text=True)

    def reward(prompts, completions, completion_ids, record, **_):
        answers = [
            [p[-1]["content"], c[-1]["content"], json.loads(r), ids[-1] != tokenizer.eos_token_id]
            for p, c, ids, r in zip(prompts, completions, completion_ids, record)
        ]
        print(json.dumps(answers), file=judge.stdin, flush=True)
        labels = json.loads(judge.stdout.readline())
        print(f"{sum(labels)} of {len(labels)} right", flush=True)
        return [float(label) for label in labels]

    settings = GRPOConfig(
        output_dir=str(out / "trl"),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        seed=spec["seed"],
        learning_rate=spec["lr"],
        lr_scheduler_type="cosine",
        weight_decay=0.0,
        beta=0.0,  # of the KL term: TRL's default
        per_device_train_batch_size=spec["batch"],
        steps_per_generation=spec["answers"] // spec["batch"],
        max_steps=spec["iterations"] * spec["answers"] // spec["batch"],
        num_generations=spec["generations"],
        max_completion_length=spec["tokens"],
        temperature=spec["temperature"],
        top_k=0,
        gradient_checkpointing=False,  # TRL's default saves memory that a small model does not need
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    # the record as text: a column of a data set has one form for all rows
    columns = [{"prompt": row["prompt"], "record": json.dumps(row)} for row in rows]
    trainer = GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=datasets.Dataset.from_list(columns),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.model.merge_and_unload().save_pretrained(out / "final")
    tokenizer.save_pretrained(out / "final")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
