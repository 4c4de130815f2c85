"""The peer of online.py: TRL's GRPOTrainer with the same model, prompts, checker and number of answers.

    <TRL's environment>/bin/python benchmarks/grpo_trl.py --model FOLDER --prompts FILE --out FOLDER --judge COMMAND

It runs in an environment of its own: `pip install torch==2.13.0 trl==1.16.0 peft`. benchmarks/methods.py makes
the records and starts it.

- LoRA of rank 16 on all linear layers of the blocks, bf16, as our runs have it.
- As online.py's iterations: `--answers` sampled answers by one policy, then steps of 16 of them.
- The reward is 1 where the checker of examples/instructions.py accepts an answer, else 0. The checker runs in our
  environment, as the process that `--judge` names.
- It writes `final`, a Hugging Face folder with the adapters merged in, and result.json: seconds of wall and CPU of
  the training (sampling included) and of the process, wall seconds of sampling alone, tokens, and the share of right
  answers of each iteration.
"""

import argparse
import json
import shlex
import subprocess
import time
from pathlib import Path


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="records; prompts are lists of messages")
    parser.add_argument("--out", required=True)
    parser.add_argument("--judge", required=True, help="see judge in benchmarks/methods.py")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--answers", type=int, default=96, help="of an iteration")
    parser.add_argument("--generations", type=int, default=4, help="answers to a prompt")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--beta", type=float, default=0.0, help="of the KL term; TRL's default")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    began, cpu_began = time.time(), time.process_time()
    import datasets
    import torch
    import transformers
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    datasets.disable_progress_bars()
    out = Path(args.out)
    rows = [json.loads(line) for line in Path(args.prompts).read_text().splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    judge = subprocess.Popen(
        shlex.split(args.judge), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    right, tokens, seconds = [], [], []  # of each iteration

    def reward(prompts, completions, completion_ids, record, **_):
        answers = [
            [p[-1]["content"], c[-1]["content"], json.loads(r), ids[-1] != tokenizer.eos_token_id]
            for p, c, ids, r in zip(prompts, completions, completion_ids, record)
        ]
        print(json.dumps(answers), file=judge.stdin, flush=True)
        labels = json.loads(judge.stdout.readline())
        right.append(sum(labels) / len(labels))
        tokens.append(sum(map(len, completion_ids)))
        return [float(label) for label in labels]

    class TimedTrainer(GRPOTrainer):
        def _generate_single_turn(self, *positional, **named):
            start = time.time()
            answers = super()._generate_single_turn(*positional, **named)
            seconds.append(time.time() - start)
            return answers

    settings = GRPOConfig(
        output_dir=str(out / "trl"),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        seed=args.seed,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        weight_decay=0.0,
        beta=args.beta,
        per_device_train_batch_size=args.batch,
        steps_per_generation=args.answers // args.batch,
        max_steps=args.iterations * args.answers // args.batch,
        num_generations=args.generations,
        max_completion_length=args.tokens,
        temperature=args.temperature,
        top_k=0,
        gradient_checkpointing=False,  # TRL's default saves memory that a small model does not need
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    # the record as text: a column of a data set has one form for all rows
    columns = [{"prompt": row["prompt"], "record": json.dumps(row)} for row in rows]
    trainer = TimedTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=datasets.Dataset.from_list(columns),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    training, cpu_training = time.time(), time.process_time()
    trainer.train()
    result = {
        "seconds": time.time() - training,
        "cpu_seconds": time.process_time() - cpu_training,
        "sampling_seconds": sum(seconds),
        "tokens": sum(tokens),
        "right": right,
        "trl": __import__("trl").__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    trainer.model.merge_and_unload().save_pretrained(out / "final")
    tokenizer.save_pretrained(out / "final")
    judge.communicate()
    result |= {
        "process_seconds": time.time() - began,
        "process_cpu_seconds": time.process_time() - cpu_began,
    }
    (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
