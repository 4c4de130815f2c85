"""Writes trl.json, the ids that TRL's trainers make of chat_records.py, in an environment with TRL:

PYTHONPATH=.:tests:tests/parity/chat <environment>/bin/python tests/parity/chat/record_trl.py
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import tokens
from chat_records import RECORDS
from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trl import KTOTrainer

ARGS = dict(max_length=None, dataset_num_proc=None, loss_type="apo_zero_unpaired")
ARGS |= dict(per_device_train_batch_size=1)


def tokenised(tokenizer, record: dict) -> dict:
    trainer = object.__new__(KTOTrainer)
    trainer._tokenizer, trainer.calculate_KL = tokenizer, False
    rows = Dataset.from_list([record | {"label": True}])
    try:
        (row,) = trainer._prepare_dataset(rows, tokenizer, SimpleNamespace(**ARGS), "train")
    except Exception as e:  # whatever the template raises
        return {"refused": str(e).splitlines()[0][:80]}
    return {"prompt": row["prompt_ids"], "completion": row["completion_ids"]}


def main():
    disable_progress_bars()
    out = {}
    for name in tokens.REAL:
        folder = tokens.real(name, Path(tempfile.mkdtemp()))
        out[name] = {}
        for key, kind in {"auto": AutoTokenizer, "tokenizer.json": PreTrainedTokenizerFast}.items():
            tokenizer = kind.from_pretrained(folder)
            ids = {k: [tokenised(tokenizer, r) for r in some] for k, some in RECORDS.items()}
            if ids not in out[name].values():
                out[name][key] = ids
    lines = (f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in out.items())
    file = Path(__file__).with_name("trl.json")
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
