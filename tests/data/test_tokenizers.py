"""Tokenizers: ids, specials and sizes of each kind, and what is refused at load."""

import json
import pickle
import shutil

import pytest
import tokenizers as hf

from mtmegatron.data.tokenizers import load_tokenizer, train_bpe
from mtmegatron.errors import UserError
from tests.shared import shared

TEXT = "Hello wörld, 你好 <|endoftext|> </s>\r\n\ttabs  and   spaces \U0001f600"
LINES = ["the cat sat on the mat\n", "the dog sat on the log\n", TEXT] * 20


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe(LINES, 300, tmp_path_factory.mktemp("bpe"))


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.begin, tokenizer.name) == (
        257,
        256,
        None,
        "bytes",
    )
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert tokenizer.decode([*tokenizer.encode(TEXT), 256]) == TEXT


def test_trained_bpe(bpe):
    assert (bpe.vocab_size, bpe.end_of_document) == (300, 0)
    assert bpe.decode(bpe.encode(TEXT)) == TEXT
    assert len(bpe.encode("the cat sat")) < len("the cat sat")
    assert bpe.encode_batch(["the", ""]) == [bpe.encode("the"), []]


def test_training_is_deterministic(tmp_path, bpe):
    again = train_bpe(iter(LINES), 300, tmp_path / "sub" / "mine.json")
    assert again.hash == bpe.hash and (tmp_path / "sub" / "mine.json").is_file()
    assert train_bpe(LINES, 299, tmp_path).hash != bpe.hash
    with pytest.raises(UserError, match="257"):
        train_bpe(LINES, 256, tmp_path)


@pytest.mark.parametrize("name", ["bytes", "aquila", "llama2_sp/tokenizer.model", "mistral_v3_sp"])
def test_special_names_in_text_stay_text(name):
    tokenizer = load_tokenizer(name if name == "bytes" else shared(f"tokenizers/{name}"))
    specials = {tokenizer.end_of_document, tokenizer.begin}
    for text in ("<|endoftext|>", "a</s>b", "<s>", TEXT):
        ids = tokenizer.encode(text)
        assert not specials & {*ids} and max(ids) < tokenizer.vocab_size
        assert tokenizer.decode(ids) == text


def test_trained_special_in_text_stays_text(bpe):
    assert 0 not in bpe.encode("<|endoftext|>") and bpe.decode(bpe.encode("<|endoftext|>")) == "<|endoftext|>"


def test_same_ids_as_transformers_without_specials(bpe):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=bpe.spec)
    for text in LINES[:2]:
        assert bpe.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "name, size, end, begin",
    [
        ("titan_test", 2020, 2003, 2002),
        ("titan_test/tokenizer.json", 2020, 2003, 2002),
        ("aquila", 100008, 100007, None),
        ("llama2_sp/tokenizer.model", 32000, 2, 1),
        ("llama2_sp", 32000, 2, 1),
        ("mistral_v3_sp", 32768, 2, 1),
    ],
)
def test_published_sizes_and_specials(name, size, end, begin):
    tokenizer = load_tokenizer(shared(f"tokenizers/{name}"))
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.begin) == (size, end, begin)


def test_size_is_the_largest_id_plus_one(tmp_path):
    """A vocabulary with a hole: 3 entries, ids up to 9."""
    hf.Tokenizer(hf.models.WordLevel({"a": 0, "b": 9, "<unk>": 1}, unk_token="<unk>")).save(
        str(tmp_path / "tokenizer.json")
    )
    assert load_tokenizer(tmp_path).vocab_size == 10


def test_truncation_padding_and_post_processor_of_the_file_have_no_effect(tmp_path, bpe):
    tokenizer = hf.Tokenizer.from_file(bpe.spec)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.post_processor = hf.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(TEXT) == bpe.encode(TEXT)


def test_end_and_begin_come_from_the_configuration_beside(tmp_path, bpe):
    tokenizer = hf.Tokenizer.from_file(bpe.spec)
    tokenizer.add_special_tokens(["<end>", "<begin>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).end_of_document == 0
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<end>"}, "bos_token": "<begin>"}))
    found = load_tokenizer(tmp_path)
    assert (found.end_of_document, found.begin, found.vocab_size) == (300, 301, 302)
    assert found.hash != load_tokenizer(bpe.spec).hash
    config.write_text(json.dumps({"eos_token": "<nowhere>"}))
    with pytest.raises(UserError, match="eos_token '<nowhere>'"):
        load_tokenizer(tmp_path)


def test_no_end_of_document_is_an_error_when_it_is_asked_for(tmp_path):
    hf.Tokenizer(hf.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="no end-of-document token"):
        load_tokenizer(tmp_path).end_of_document


def test_hash_is_of_the_content_not_of_the_place(tmp_path, bpe):
    shutil.copy(bpe.spec, tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path).hash == bpe.hash
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).hash != bpe.hash


def test_tokenizer_travels_to_another_process(bpe):
    for tokenizer in (bpe, load_tokenizer("bytes")):
        assert pickle.loads(pickle.dumps(tokenizer)).encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.parametrize(
    "files, spec, message",
    [
        ({}, "nothing", "no such tokenizer"),
        ({}, ".", "no tokenizer in this folder"),
        ({"tokenizer.json": "{"}, ".", "not JSON"),
        ({"tokenizer.json": "[]"}, "tokenizer.json", "not a JSON object"),
        ({"tokenizer.json": "{}"}, "tokenizer.json", "not a usable tokenizer.json"),
        ({"x.model": "IQ== 0"}, "x.model", "not a SentencePiece model"),
        (
            {"vocab.json": '{"a": 0}', "merges.txt": "#version: 0.2\na b\n"},
            ".",
            "merge 1 of merges.txt, 'a b', needs the token 'b'",
        ),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a\n"}, ".", "merge 1 of merges.txt"),
    ],
)
def test_unusable_files_are_refused_by_name(tmp_path, files, spec, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tmp_path / spec)
    assert str(tmp_path) in str(caught.value)
