"""The model made on the spot, models of folders, what is said of one that cannot be trained, and lengths."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
)

from halfstep.errors import HalfstepError
from halfstep.train import tiny
from halfstep.train.dataset import read
from halfstep.train.lengths import check_lengths
from halfstep.train.pretrained import find

USER, ANSWER = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello you"}


def make(tmp_path, task, *records):
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return read(task, str(tmp_path / "data.jsonl"), held_out=0)


@pytest.fixture
def text(tmp_path):
    return make(tmp_path, "pretrain", *({"text": f"the number {number} is a number"} for number in range(50)))


@pytest.fixture
def talk(tmp_path):
    return make(tmp_path, "sft", {"messages": [USER, ANSWER]})


def test_tiny_is_small_fp32_and_of_sizes_that_tensor_cores_like(text):
    loaded = find("tiny", text)
    config = loaded.load().config
    assert loaded.num_parameters < 1_000_000
    assert str(loaded) == "tiny: LlamaForCausalLM, 918,656 parameters"
    assert loaded.context == config.max_position_embeddings == 4096
    assert all(parameter.dtype == torch.float32 for parameter in loaded.load().parameters())
    assert all(size % 8 == 0 for parameter in loaded.load().parameters() for size in parameter.shape)
    words = loaded.tokenizer
    assert len(words) <= config.vocab_size
    ids = (config.pad_token_id, config.bos_token_id, config.eos_token_id)
    assert ids == (words.pad_token_id, words.bos_token_id, words.eos_token_id) == (0, 1, 2)


def test_tiny_writes_any_text(text):
    words = find("tiny", text).tokenizer
    for string in ("the number 7", " \tdef f():\r\n    é 你好 😀\x00", "<s> in words"):
        ids = words(string, add_special_tokens=False)["input_ids"]
        assert words.decode(ids, clean_up_tokenization_spaces=False) == string
    assert words("a")["input_ids"][0] == words.bos_token_id
    assert words("a</s>")["input_ids"][-1] == words.eos_token_id
    assert len(words("the number")["input_ids"]) < 6  # it has learned the words of its data


def test_a_conversation_in_tokens(talk):
    words = find("tiny", talk).tokenizer
    whole = words.apply_chat_template([USER, ANSWER], tokenize=False)
    assert whole == "<s><|user|>\nhi there</s><|assistant|>\nhello you</s>"
    asked = words.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert whole.startswith(asked)
    ids = words.apply_chat_template([USER, ANSWER])["input_ids"]
    assert ids.count(words.bos_token_id) == 1
    begun = words.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert ids[: len(begun)] == begun


def test_tiny_is_the_same_in_another_process_and_differs_by_seed(text):
    first, again, other = (find("tiny", text, seed) for seed in (0, 0, 1))
    for name, weight in first.load().state_dict().items():
        assert torch.equal(weight, again.load().state_dict()[name])
    assert not torch.equal(first.load().lm_head.weight, other.load().lm_head.weight)
    program = (
        "from halfstep.train import tiny, dataset;"
        f"d = dataset.read('pretrain', {text.source!r}, held_out=0); w = tiny.tokenizer(d.texts());"
        "print(w.backend_tokenizer.to_str(), tiny.model(w).lm_head.weight.double().sum().item())"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    total = first.load().lm_head.weight.double().sum().item()
    assert out == f"{first.tokenizer.backend_tokenizer.to_str()} {total}"


def test_making_tiny_leaves_torchs_random_state_alone(text):
    state = torch.get_rng_state()
    find("tiny", text, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_only_the_first_texts_train_the_tokenizer():
    assert list(tiny._first(iter(["abc", "def", "ghi"]), 5)) == ["abc", "de"]
    assert list(tiny._first(iter(["abc"]), 5)) == ["abc"]


@pytest.fixture
def folder(tmp_path, text):
    """tiny as transformers writes it, in bf16."""
    loaded = find("tiny", text)
    loaded.load().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def message(name, data):
    with pytest.raises(HalfstepError) as caught:
        find(str(name), data).load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_loaded_in_fp32_whatever_it_was_saved_in(folder, text):
    loaded = find(str(folder), text)
    assert all(parameter.dtype == torch.float32 for parameter in loaded.load().parameters())
    original = find("tiny", text)
    for name, weight in original.load().state_dict().items():
        assert torch.equal(weight.bfloat16().float(), loaded.load().state_dict()[name])
    line = "the number 7</s>"
    assert loaded.tokenizer(line)["input_ids"] == original.tokenizer(line)["input_ids"]
    assert loaded.tokenizer.chat_template == original.tokenizer.chat_template
    assert loaded.context == 4096
    assert loaded.notes == ()
    assert str(loaded) == f"{folder}: LlamaForCausalLM, 918,656 parameters"  # those that are shared count once


def test_a_tokenizer_without_a_pad_token_pads_with_eos(folder, text):
    words = AutoTokenizer.from_pretrained(folder)
    words.pad_token = None
    words.save_pretrained(folder)
    loaded = find(str(folder), text)
    assert loaded.tokenizer.pad_token == "</s>"
    assert loaded.notes == ("The tokenizer has no pad token: its eos token '</s>' pads, which changes no loss.",)
    words.eos_token = None
    words.save_pretrained(folder)
    assert "its tokenizer has no eos token, which ends an answer" in message(folder, text)


def test_a_folder_that_cannot_be_trained_says_why_in_one_line(folder, text, talk, tmp_path):
    assert message(tmp_path / "nowhere", text).startswith(f"model {tmp_path / 'nowhere'}: there is no such folder.")
    assert "it is a file, not a folder" in message(tmp_path / "data.jsonl", text)
    (tmp_path / "empty").mkdir()
    assert "the folder has no config.json. Give the folder that save_pretrained" in message(tmp_path / "empty", text)
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "no config.json but an adapter's" in message(tmp_path / "empty", text)

    words = AutoTokenizer.from_pretrained(folder)
    words.chat_template = None
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "chat_template.jinja").unlink()
    words.save_pretrained(bare)
    find(str(bare), text)
    assert "its tokenizer has no chat template, and" in message(bare, talk)

    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 200}
    GPT2LMHeadModel(GPT2Config(**small)).save_pretrained(bare)
    assert f"its tokenizer has {len(words)} tokens and the model 200 embeddings" in message(bare, text)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(**sizes, vocab_size=200)).save_pretrained(tmp_path / "bert")
    assert "the folder has no tokenizer. Write it there with" in message(tmp_path / "bert", text)

    LlamaModel(LlamaConfig(**sizes, vocab_size=1024)).save_pretrained(folder)
    assert "its files lack the weights lm_head.weight. Give a folder with all weights" in message(folder, text)
    (folder / "model.safetensors").write_bytes(b"broken")
    assert "its weights cannot be loaded" in message(folder, text)
    (folder / "config.json").write_text("{")
    assert "its configuration cannot be loaded" in message(folder, text)


def test_a_model_that_writes_no_text_is_refused(folder, text):
    (folder / "config.json").write_text('{"model_type": "vit"}')
    assert "it is a vit model, which has no causal language model" in message(folder, text)


def test_a_name_of_the_hub_that_cannot_be_had_is_one_line(text, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = message("nobody/nothing", text)
    assert said.startswith("model nobody/nothing: there is no such folder, and the hub did not give it: ")
    assert said.endswith(
        "Give tiny, a folder that save_pretrained wrote, or a name of the hub while it can be reached."
    )


def test_lengths_are_those_of_trl(tmp_path):
    data = make(
        tmp_path,
        "dpo",
        {"prompt": "one two\n", "chosen": "three", "rejected": "three three three"},
        {"prompt": "one\n", "chosen": "two", "rejected": "x"},
    )
    words = find("tiny", data).tokenizer
    whole = [words(text + "</s>")["input_ids"] for text in ("one two\nthree three three", "one\ntwo")]
    lengths = check_lengths(data, words, 100)
    assert (lengths.longest, lengths.num_tokens) == (len(whole[0]), sum(map(len, whole)))
    assert (lengths.num_cut, lengths.notes) == (0, ())
    cut = check_lengths(data, words, len(whole[0]) - 1)
    assert cut.num_cut == 1
    assert cut.notes == (
        f"1 example is longer than --max-length {len(whole[0]) - 1} and is cut there; the longest has "
        f"{len(whole[0])} tokens.",
    )


def test_lengths_of_conversations(talk, tmp_path):
    words = find("tiny", talk).tokenizer
    whole = words.apply_chat_template([USER, ANSWER])["input_ids"]
    assert check_lengths(talk, words, 100).longest == len(whole)
    pair = make(tmp_path, "sft", {"prompt": [USER], "completion": [ANSWER]})
    assert check_lengths(pair, words, 100).longest == len(whole)
    num = len(words.apply_chat_template([USER], add_generation_prompt=True)["input_ids"])
    check_lengths(pair, words, num + 1)
    with pytest.raises(HalfstepError, match=f"line 1: its prompt has {num} tokens, and --max-length {num} leaves none"):
        check_lengths(pair, words, num)


def test_a_prompt_that_fills_the_context_is_named(tmp_path):
    short, long = {"prompt": "a\n", "completion": "b"}, {"prompt": "0123456789" * 5, "completion": "b"}
    data = make(tmp_path, "sft", short, long, short, long)
    words = find("tiny", make(tmp_path, "pretrain", {"text": "unlike"})).tokenizer
    with pytest.raises(HalfstepError) as caught:
        check_lengths(data, words, 20)
    assert str(caught.value) == (
        f"{tmp_path / 'data.jsonl'} line 2: its prompt has 51 tokens, as 1 more has too many, and --max-length 20 "
        "leaves none for the answer. Use --max-length 52 or more, shorten such prompts, or leave the lines out."
    )
    with pytest.raises(HalfstepError, match="or leave the lines out: one needs 52, and the model takes 51"):
        check_lengths(data, words, 20, context=51)


def test_a_text_to_pretrain_on_is_never_cut(text):
    lengths = check_lengths(text, find("tiny", text).tokenizer, 2)
    assert lengths.num_cut == 0
    assert lengths.longest > 2


def test_a_length_beyond_the_context_is_refused(text):
    loaded = find("tiny", text)
    check_lengths(text, loaded.tokenizer, 4096, loaded.context)
    with pytest.raises(HalfstepError, match=r"--max-length 4097: the model takes 4096 tokens\. Use 4096 or less\."):
        check_lengths(text, loaded.tokenizer, 4097, loaded.context)
