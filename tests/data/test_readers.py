"""Readers: every kind of file gives the same documents, every fault its place."""

import gzip
import json

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from mtmegatron.data.readers import documents, list_files
from mtmegatron.errors import UserError

TEXTS = ["first", "sécond\r\nline\n", "", "你好"]
LINES = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS).encode()


def texts(*paths, keys=("text",), **options):
    return [document.texts[keys[0]] for document in documents(paths, keys, **options)]


def test_json_kinds_give_the_same_documents(tmp_path):
    records = [{"text": text} for text in TEXTS]
    files = {
        "a.jsonl": LINES,
        "a.ndjson": LINES.replace(b"\n", b"\r\n").rstrip(),
        "lines.json": b"\n" + LINES,
        "bom.jsonl": b"\xef\xbb\xbf" + LINES,
        "array.json": json.dumps(records, indent=2).encode(),
        "bom.json": b"\xef\xbb\xbf \n" + json.dumps(records, ensure_ascii=False).encode(),
        "a.jsonl.gz": gzip.compress(LINES),
        "array.json.gz": gzip.compress(json.dumps(records).encode()),
        "two.jsonl.gz": gzip.compress(LINES[:9]) + gzip.compress(LINES[9:]),
        "a.jsonl.zst": zstandard.compress(LINES),
        "two.jsonl.zst": zstandard.compress(LINES[:9]) + zstandard.compress(LINES[9:]),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert texts(tmp_path / name) == TEXTS, name
    parquet.write_table(pyarrow.table({"text": TEXTS, "n": [1, 2, 3, 4]}), tmp_path / "a.parquet", row_group_size=2)
    assert texts(tmp_path / "a.parquet") == TEXTS


@pytest.mark.parametrize("size", [0, 1, 100, 5_000_000])
def test_zstd_of_any_size(tmp_path, size):
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"x" * size))
    assert texts(tmp_path / "a.txt.zst") == ["x" * size]


def test_zstd_streamed_without_a_size(tmp_path):
    content = b"".join(json.dumps({"text": str(i) * 50}).encode() + b"\n" for i in range(5000))
    compressor = zstandard.ZstdCompressor().compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(compressor.compress(content) + compressor.flush())
    assert texts(tmp_path / "a.jsonl.zst") == [str(i) * 50 for i in range(5000)]


def test_other_files_are_one_document_each_with_their_bytes(tmp_path):
    for name in ("a.txt", "b.py", "noext"):
        (tmp_path / name).write_bytes("x\r\ny\tü\n".encode())
    (tmp_path / "c.md.gz").write_bytes(gzip.compress(b"# t"))
    found = list(documents([tmp_path], ("anything",)))
    assert [d.texts["anything"] for d in found] == ["x\r\ny\tü\n", "x\r\ny\tü\n", "# t", "x\r\ny\tü\n"]
    assert [d.source for d in found] == [str(tmp_path / n) for n in ("a.txt", "b.py", "c.md.gz", "noext")]


def test_folders_are_walked_sorted_without_hidden_files(tmp_path):
    for name in ("b/z.txt", "b/a.txt", "a.txt", ".hidden", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a.txt", "b/a.txt", "b/z.txt"]
    assert texts(tmp_path / "b" / "z.txt", tmp_path / "a.txt") == ["b/z.txt", "a.txt"]


def test_missing_and_empty_inputs_are_named(tmp_path):
    with pytest.raises(UserError, match="nothing: no such file"):
        list_files([tmp_path / "nothing"])
    with pytest.raises(UserError, match="a folder without files"):
        list_files([tmp_path])


def test_several_keys_of_a_record(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "1", "a": "2"}\n')
    assert [d.texts for d in documents([tmp_path / "a.jsonl"], ("a", "q"))] == [{"a": "2", "q": "1"}]
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="plain text has no keys"):
        texts(tmp_path / "a.txt", keys=("a", "q"))


FAULTS = [
    (b'{"text": "a"', "not JSON"),
    (b'{"text": "a"} {"text": "b"}', "not JSON .Extra data"),
    (b'{"text": "\xff"}', "not JSON .*utf-8"),
    (b"[" * 100000, "not JSON"),
    (b'["text"]', "a list where an object"),
    (b"null", "a NoneType where an object"),
    (b'{"txt": "a", "b": 1}', r"no key 'text' \(it has txt, b\)"),
    (b"{}", r"no key 'text' \(it has none\)"),
    (b'{"text": null}', "'text' is a NoneType"),
    (b'{"text": 5}', "'text' is a int"),
    (b'{"text": "ab\\ud83d"}', "'text' holds half of a surrogate pair at character 2"),
]


@pytest.mark.parametrize("line, message", FAULTS)
def test_malformed_line_is_named_or_skipped_with_a_count(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "four"}')
    with pytest.raises(UserError, match=rf"a.jsonl:3: {message}"):
        texts(path)
    heard = []
    assert texts(path, fault=heard.append) == ["one", "four"]
    assert len(heard) == 1 and heard[0].startswith(f"{path}:3: ")


def test_malformed_items_of_an_array_and_rows_of_a_parquet(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "one"}, {"text": 2}, {"text": "three"}]')
    parquet.write_table(pyarrow.table({"text": ["one", None, "three"]}), tmp_path / "a.parquet")
    for name in ("a.json", "a.parquet"):
        heard = []
        assert texts(tmp_path / name, fault=heard.append) == ["one", "three"]
        assert [message.startswith(f"{tmp_path / name}:2: ") for message in heard] == [True]


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok\nok\n\xff\xfe")
    with pytest.raises(UserError, match="a.txt:3: not UTF-8 text .byte 6"):
        texts(tmp_path)
    heard = []
    assert texts(tmp_path, fault=heard.append) == [] and len(heard) == 1


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("fault", ["cut", "foreign", "flipped"])
def test_damaged_compression_is_an_error_of_the_file(tmp_path, name, fault):
    """Even where malformed records are skipped: nobody knows how many were lost."""
    import random

    content = "".join(json.dumps({"text": random.Random(i).randbytes(99).hex()}) + "\n" for i in range(3000)).encode()
    whole = (
        gzip.compress(content)
        if name.endswith("gz")
        else zstandard.ZstdCompressor(write_checksum=True).compress(content)
    )
    middle = len(whole) // 2
    damaged = {
        "cut": whole[:-9],
        "foreign": b"PK" + whole,
        "flipped": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
    }
    (tmp_path / name).write_bytes(damaged[fault])
    with pytest.raises(UserError, match=f"{name}: cannot be read to its end"):
        texts(tmp_path / name, fault=lambda message: None)


def test_malformed_array_and_parquet_are_errors_of_the_file(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "one"},\n {"text": }]')
    with pytest.raises(UserError, match="a.json:2: not a JSON array"):
        texts(tmp_path / "a.json", fault=lambda message: None)
    (tmp_path / "a.parquet").write_text("PAR1 no")
    with pytest.raises(UserError, match="a.parquet: not a whole parquet"):
        texts(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"body": ["x"], "url": ["y"]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="no column 'text': choose of body, url"):
        texts(tmp_path / "b.parquet")
