"""examples/smollm2.py: a GGUF file becomes a Hugging Face folder with the same logits and the model's own
token ids. Here with a small random model."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import Started
from tiny_models import load_transformers, logits, same, shaken
from tokens import FILES

import smollm2
from models import load
from models.hub import Source
from records.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] \
+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
HEADS, KEY_HEADS = 4, 2


@pytest.fixture(scope="module")
def hf():
    """A small Llama, tied."""
    config = transformers.LlamaConfig(
        vocab_size=515, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=64,
        rope_theta=1000.0, rms_norm_eps=1e-3, tie_word_embeddings=True,
    )  # fmt: skip
    return shaken(transformers.LlamaForCausalLM(config))


def as_llama_cpp_stores(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix in the order of llama.cpp's convert_hf_to_gguf.py."""
    return x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


@pytest.fixture(scope="module")
def gguf_file(hf, tmp_path_factory) -> Path:
    """The model and the tests' tokenizer as GGUF."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    config = hf.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    found = json.loads((FILES / "tokenizer.json").read_text())["model"]
    # "20" is a token that the pre-tokenizer must never let happen
    texts = [*sorted(found["vocab"], key=found["vocab"].get), *SPECIAL[1:], "20"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(texts)
    writer.add_token_types([3 if text in SPECIAL else 1 for text in texts])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in found["merges"]]
    writer.add_token_merges([*merges, "2 0"])
    for name, text in (("bos", 1), ("eos", 2), ("pad", 2), ("unk", 0)):
        getattr(writer, f"add_{name}_token_id")(texts.index(SPECIAL[text]))
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, x in hf.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        x = x.numpy()
        heads = HEADS if "q_proj" in name else KEY_HEADS if "k_proj" in name else None
        if heads:
            x = as_llama_cpp_stores(x, heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def made(gguf_file, tmp_path_factory) -> Path:
    """The folder that the command makes."""
    out = tmp_path_factory.mktemp("made") / "deep" / "model"
    argv = ["--gguf", gguf_file, "--out", out]
    code, _, stderr = Started(out.parent.parent, smollm2.__file__, argv).ended()
    assert code == 0, stderr
    assert [p.name for p in out.parent.iterdir()] == ["model"], "nothing is left beside it"
    return out


def test_its_logits_are_those_of_the_model_in_the_gguf_file(made, hf):
    ids = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = hf(ids[None]).logits[0]
        assert same(logits(load.load_model(made), ids.numpy()), theirs, 1e-4)
        assert same(load_transformers(made)(ids[None]).logits[0], theirs, 1e-4)


def test_its_tokenizer_is_byte_level_with_single_digits(made):
    tokenizer = Tokenizer(Source(made))
    texts = ["Hello there,  two spaces", "Größe 漢字 🙂\n\n\tend", "in 2024", "x 1,000"]
    ids = list(tokenizer.encode(texts))
    assert [tokenizer.decode(x) for x in ids] == texts
    digits, *singles = tokenizer.encode(["2024", "2", "0", "2", "4"])
    assert digits == [x for (x,) in singles]
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.eos) == "<|im_end|>"
    assert tokenizer.stops == (tokenizer.eos,) and not tokenizer.prefix
