"""Indexed files: the bytes of the format, several sequences per document, merging, and the ways a file can be wrong."""

import os
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtmegatron.data import indexed
from mtmegatron.data.indexed import CODES, IndexedReader, IndexedWriter, merge, token_dtype
from mtmegatron.errors import UserError

GOLDEN = (  # lengths [3, 2], documents [0, 1, 2], int32
    "4d4d4944494458000001000000000000000402000000000000000300000000000000030000000200000000000000000000000c000000000000000000"
    "00000000000001000000000000000200000000000000"
)


def write(prefix, documents, dtype=np.int32, description=None):
    with IndexedWriter(prefix, dtype, description) as writer:
        for tokens in documents:
            writer.add(np.array(tokens, dtype))
    return str(prefix)


def write_index(prefix, lengths, pointers, starts, tokens, modes=b"", dtype="<i4"):
    """An index by hand, right or wrong."""
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[np.dtype(dtype)], len(lengths), len(starts))
    body = np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes() + np.array(starts, "<i8").tobytes()
    (prefix.parent / f"{prefix.name}.idx").write_bytes(header + body + modes)
    (prefix.parent / f"{prefix.name}.bin").write_bytes(np.array(tokens, dtype).tobytes())
    return prefix


def test_index_bytes_are_megatrons(tmp_path):
    prefix = write(tmp_path / "x", [[1, 2, 3], [4, 5]])
    assert (tmp_path / "x.idx").read_bytes().hex() == GOLDEN
    assert (tmp_path / "x.bin").read_bytes() == np.arange(1, 6, dtype="<i4").tobytes()
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx", "x.meta.json"]
    reader = IndexedReader(prefix)
    assert (reader.documents, reader.tokens, reader.lengths.tolist()) == (2, 5, [3, 2])
    assert reader.read(1).tolist() == [4, 5] and reader.read(0, 1, 1).tolist() == [2]


@pytest.mark.parametrize(
    "vocab, dtype", [(2, "uint16"), (65499, "uint16"), (65500, "int32"), (65536, "int32"), (200000, "int32")]
)
def test_token_dtype_switches_at_65500(vocab, dtype):
    assert token_dtype(vocab) == np.dtype(dtype)


@pytest.mark.parametrize("dtype", sorted(CODES, key=str))
def test_every_dtype_of_the_format_reads_back(tmp_path, dtype):
    reader = IndexedReader(write(tmp_path / "x", [[7, 0], [9]], dtype))
    assert reader.dtype == dtype and reader.read(0).tolist() == [7, 0] and reader.read(1).tolist() == [9]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.lists(st.integers(0, 65535), max_size=5), min_size=1, max_size=9).filter(any),
    chunk=st.sampled_from([1, 2, 1 << 20]),
)
def test_round_trip_whatever_the_documents(tmp_path, documents, chunk):
    """Also when the index is written and checked in pieces of 1 or 2 elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed, "CHUNK", chunk)
        reader = IndexedReader(write(tmp_path / "x", documents, np.uint16))
        twice = merge([tmp_path / "x"] * 2, tmp_path / "y")
        flat = [token for document in documents for token in document]
        assert reader.largest_token()[0] == max(flat) and max(flat) in documents[reader.largest_token()[1]]
        assert reader.extremes()[0][0] == min(flat) and min(flat) in documents[reader.extremes()[0][1]]
    assert [reader.read(i).tolist() for i in range(reader.documents)] == documents
    assert [twice.read(i).tolist() for i in range(twice.documents)] == documents * 2
    assert reader.lengths.tolist() == [len(document) for document in documents]


def test_several_sequences_make_one_document(tmp_path):
    prefix = write_index(tmp_path / "x", [3, 2, 2], [0, 12, 20], [0, 2, 2, 3], range(7))
    reader = IndexedReader(prefix)
    assert reader.documents == 3 and reader.lengths.tolist() == [5, 0, 2]
    assert [reader.read(i).tolist() for i in range(3)] == [[0, 1, 2, 3, 4], [], [5, 6]]
    assert reader.largest_token() == (6, 2)
    merged = merge([prefix, prefix], tmp_path / "y")
    assert merged.sequence_lengths.tolist() == [3, 2, 2] * 2 and merged.document_starts.tolist() == [
        0,
        2,
        2,
        3,
        5,
        5,
        6,
    ]
    assert merged.read(3).tolist() == [0, 1, 2, 3, 4]


def test_modes_are_kept_and_default_to_zero_in_a_merge(tmp_path):
    with_modes = write_index(tmp_path / "a", [1, 1], [0, 4], [0, 1, 2], [5, 6], modes=bytes([1, 0]))
    without = write(tmp_path / "b", [[7]])
    assert IndexedReader(with_modes).modes.tolist() == [1, 0]
    assert merge([without, with_modes, without], tmp_path / "c").modes.tolist() == [0, 1, 0, 0]


def test_merge_refuses_what_does_not_belong_together(tmp_path):
    a = write(tmp_path / "a", [[1]], description={"tokenizer": "one", "tokenizer_hash": "1"})
    b = write(tmp_path / "b", [[1]], description={"tokenizer": "two", "tokenizer_hash": "2"})
    with pytest.raises(UserError, match="different tokenizers"):
        merge([a, b], tmp_path / "c")
    with pytest.raises(UserError, match="uint16"):
        merge([a, write(tmp_path / "d", [[1]], np.uint16)], tmp_path / "c")
    assert not list(tmp_path.glob("c.*"))
    assert merge([a, a], tmp_path / "a").description == {
        "tokenizer": "one",
        "tokenizer_hash": "1",
        "documents": 2,
        "tokens": 2,
    }


def test_description_of_another_file_is_refused(tmp_path):
    write(tmp_path / "a", [[1, 2]], description={"tokenizer": "bytes"})
    assert IndexedReader(tmp_path / "a").description["tokenizer"] == "bytes"
    write(tmp_path / "b", [[1]])
    os.replace(tmp_path / "b.meta.json", tmp_path / "a.meta.json")
    with pytest.raises(UserError, match="a.meta.json: describes other files"):
        IndexedReader(tmp_path / "a").description
    (tmp_path / "a.meta.json").write_text("[")
    with pytest.raises(UserError, match="not a description"):
        IndexedReader(tmp_path / "a").description
    (tmp_path / "a.meta.json").unlink()
    assert IndexedReader(tmp_path / "a").description == {}


def cut(path, size):
    os.truncate(path, size)


FAULTS = {
    "no such file": lambda p: os.remove(f"{p}.idx"),
    "no such file ": lambda p: os.remove(f"{p}.bin"),
    r"x.idx: 0 bytes, truncated": lambda p: cut(f"{p}.idx", 0),
    r"x.idx: 40 bytes where its header says 82, truncated": lambda p: cut(f"{p}.idx", 40),
    r"x.idx: 81 bytes where its header says 82, truncated": lambda p: cut(f"{p}.idx", 81),
    r"x.idx: 90 bytes where its header says 82, foreign": lambda p: cut(f"{p}.idx", 90),
    r"x.idx: not an index of this format": lambda p: poke(f"{p}.idx", 0, b"TNTIDX"),
    r"version 2": lambda p: poke(f"{p}.idx", 9, b"\2"),
    r"dtype code 9": lambda p: poke(f"{p}.idx", 17, b"\x09"),
    r"pointers do not follow": lambda p: poke(f"{p}.idx", 50, b"\x08"),
    r"pointers do not follow ": lambda p: poke(f"{p}.idx", 34, np.array([-1], "<i4").tobytes()),
    r"documents do not cover the sequences": lambda p: poke(f"{p}.idx", 66, b"\3"),
    r"documents do not cover the sequences ": lambda p: poke(f"{p}.idx", 74, b"\1"),
    r"x.bin: 19 bytes where the index says 20, truncated": lambda p: cut(f"{p}.bin", 19),
    r"x.bin: 0 bytes where the index says 20, truncated": lambda p: cut(f"{p}.bin", 0),
    r"x.bin: 24 bytes where the index says 20, of another index": lambda p: cut(f"{p}.bin", 24),
}


def poke(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("message", FAULTS)
def test_wrong_files_are_named_with_a_repair(tmp_path, message):
    prefix = write(tmp_path / "x", [[1, 2, 3], [4, 5]])
    FAULTS[message](prefix)
    with pytest.raises(UserError, match=message.strip()) as caught:
        IndexedReader(prefix)
    assert str(tmp_path / "x") in str(caught.value) and "prepare" in str(caught.value)


def test_empty_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="empty, 0 documents"):
        IndexedReader(write(tmp_path / "x", []))
    with pytest.raises(UserError, match="empty, 2 documents"):
        IndexedReader(write(tmp_path / "x", [[], []]))


def test_file_that_shrinks_while_open_is_an_error(tmp_path):
    reader = IndexedReader(write(tmp_path / "x", [[1, 2, 3], [4, 5]]))
    cut(tmp_path / "x.bin", 10)
    with pytest.raises(UserError, match="shrank"):
        reader.read(1)


def test_suffix_in_the_prefix_is_forgiven(tmp_path):
    prefix = write(tmp_path / "x", [[1]])
    assert IndexedReader(f"{prefix}.bin").prefix == IndexedReader(f"{prefix}.idx").prefix == prefix


def test_failed_writer_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), IndexedWriter(tmp_path / "x", np.int32) as writer:
        writer.add([1])
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_killed_writer_leaves_nothing_that_looks_whole(tmp_path):
    write(tmp_path / "x", [[1]])
    if os.fork() == 0:
        writer = IndexedWriter(tmp_path / "y", np.int32)
        writer.add(np.zeros(1 << 20, np.int32))
        os._exit(1)
    os.wait()
    with pytest.raises(UserError, match="its preparation did not finish"):
        IndexedReader(tmp_path / "y")
    assert IndexedReader(write(tmp_path / "y", [[3]])).tokens == 1  # what was left is in nobody's way
    assert not list(tmp_path.glob("*.partial"))


def test_old_index_never_meets_new_tokens(tmp_path, monkeypatch):
    """A writer that dies between publishing `.bin` and `.idx`, over an older file of the very same sizes."""
    prefix, replace = write(tmp_path / "x", [[1, 2], [3]]), os.replace

    def die_at_index(source, target):
        if target.endswith(".idx"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", die_at_index)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x", [[7], [8, 9]])
    with pytest.raises(UserError, match="x.idx: no such file"):
        IndexedReader(prefix)


def test_two_writers_of_one_prefix_are_refused(tmp_path):
    with IndexedWriter(tmp_path / "x", np.int32) as writer:
        with pytest.raises(UserError, match="another process is writing it"):
            IndexedWriter(tmp_path / "x", np.int32)
        writer.add([5])
    assert IndexedReader(tmp_path / "x").read(0).tolist() == [5]


@pytest.mark.parametrize("token", [65536, -1, 100000])
def test_token_that_does_not_fit_is_refused_not_wrapped(tmp_path, token):
    with (
        pytest.raises(UserError, match=f"token id {token} does not fit uint16"),
        IndexedWriter(tmp_path / "x", np.uint16) as writer,
    ):
        writer.add([1, token])


def test_reader_travels_to_another_process(tmp_path):
    import pickle

    reader = pickle.loads(pickle.dumps(IndexedReader(write(tmp_path / "x", [[1, 2]]))))
    assert reader.read(0).tolist() == [1, 2]
