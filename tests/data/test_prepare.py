"""Preparation: one document in, one out, the same bytes for any number of workers, and nothing left after a failure."""

import json
import os
import signal

import pytest

from mtmegatron.data import prepare as module
from mtmegatron.data.indexed import IndexedReader
from mtmegatron.data.prepare import prepare
from mtmegatron.data.tokenizers import load_tokenizer
from mtmegatron.errors import UserError

BYTES = load_tokenizer("bytes")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"document {i} " * (i % 7), "title": f"t{i}"}) + "\n" for i in range(40))
    )
    return path


def read_texts(prefix, tokenizer=BYTES):
    reader = IndexedReader(prefix)
    return [tokenizer.decode(reader.read(i).tolist()) for i in range(reader.documents)]


def test_documents_come_out_in_order_with_ends_and_a_description(tmp_path, corpus):
    summary = prepare([corpus], tmp_path / "out" / "x", BYTES)
    expected = [f"document {i} " * (i % 7) for i in range(40) if i % 7]
    assert read_texts(tmp_path / "out" / "x") == expected
    (output,) = summary.outputs
    assert (output.documents, output.empty, summary.malformed) == (len(expected), 6, 0)
    assert output.tokens == sum(len(text) + 1 for text in expected)
    reader = IndexedReader(tmp_path / "out" / "x")
    assert reader.dtype == "uint16" and reader.description == {
        "tokenizer": "bytes", "tokenizer_hash": BYTES.hash, "vocab_size": 257, "end_of_document": 256, "begin": None,
        "key": "text", "documents": output.documents, "tokens": output.tokens,
    }  # fmt: skip
    assert sorted(os.listdir(tmp_path / "out")) == ["x.bin", "x.idx", "x.meta.json"]


def test_each_key_has_its_files_and_skips_its_own_empty_documents(tmp_path, corpus):
    summary = prepare([corpus], tmp_path / "x", "bytes", keys=["title", "text"])
    assert [(o.prefix, o.key, o.documents, o.empty) for o in summary.outputs] == [
        (str(tmp_path / "x_title"), "title", 40, 0), (str(tmp_path / "x_text"), "text", 34, 6)
    ]  # fmt: skip
    assert read_texts(tmp_path / "x_title") == [f"t{i}" for i in range(40)]
    prepare([corpus], tmp_path / "y", "bytes", keys=["text"])
    assert (tmp_path / "y.bin").read_bytes() == (tmp_path / "x_text.bin").read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_small_chunks_change_nothing(tmp_path, corpus, monkeypatch, workers):
    prepare([corpus], tmp_path / "x", "bytes")
    monkeypatch.setattr(module, "CHUNK_DOCUMENTS", 3)
    seen = []
    prepare([corpus], tmp_path / "y", "bytes", workers=workers, progress=lambda *counts: seen.append(counts))
    assert all(
        (tmp_path / f"x{s}").read_bytes() == (tmp_path / f"y{s}").read_bytes() for s in (".bin", ".idx", ".meta.json")
    )
    assert len(seen) == 14 and seen == sorted(seen) and seen[-1][0] == 34


def test_failure_leaves_what_was_there_before(tmp_path, corpus):
    prepare([corpus], tmp_path / "x", "bytes")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with corpus.open("a") as file:
        file.write("{\n")
    before["in.jsonl"] = corpus.read_bytes()
    for keys in (["text"], ["text", "title"]):
        with pytest.raises(UserError, match="in.jsonl:41: not JSON"):
            prepare([corpus], tmp_path / "x", "bytes", keys=keys)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def kill_worker(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_dead_worker_is_an_error_and_not_a_wait(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(module, "_encode", kill_worker)
    with pytest.raises(UserError, match="a worker process died"):
        prepare([corpus], tmp_path / "x", "bytes", workers=2)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_begin_needs_a_tokenizer_that_has_one(tmp_path, corpus):
    with pytest.raises(UserError, match="no beginning-of-document token"):
        prepare([corpus], tmp_path / "x", "bytes", prepend_begin=True)


def test_missing_key_for_all_is_an_error_even_when_skipping(tmp_path, corpus):
    with pytest.raises(
        UserError,
        match=r"no content for 'body': 0 empty documents and 40 malformed records, .*in.jsonl:1: no",
    ):
        prepare([corpus], tmp_path / "x", "bytes", keys=["body"], on_error="skip")
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_output_that_cannot_be_written_is_named(tmp_path, corpus):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/x: cannot be written"):
        prepare([corpus], tmp_path / "file" / "x", "bytes")
