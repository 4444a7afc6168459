"""Data faults that users of other frameworks met; each test carries its number in the list of field cases."""

import json
import multiprocessing
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import tokenizers as hf

from mtmegatron.data import gpt
from mtmegatron.data.gpt import GPTDataset, check_tokenizer, check_vocabulary
from mtmegatron.data.indexed import IndexedReader, IndexedWriter, merge, token_dtype
from mtmegatron.data.prepare import prepare
from mtmegatron.data.samples import _index_dtype
from mtmegatron.data.tokenizers import load_tokenizer
from mtmegatron.errors import UserError
from tests.data.test_indexed import write, write_index
from tests.shared import shared

C4 = "text/llamafactory/c4_demo.jsonl"
ALPACA = "text/llamafactory/alpaca_en_demo.json"


def lines(path, key="text"):
    return [json.loads(line)[key] for line in path.open()]


@pytest.mark.filterwarnings("error")
def test_d01_pointers_beyond_2_31_bytes(tmp_path):
    lengths, pointers = [600000000, 600000000, 5], [0, 2400000000, 4800000000]
    write_index(tmp_path / "x", lengths, pointers, [0, 1, 2, 3], [])
    with open(tmp_path / "x.bin", "r+b") as file:
        file.seek(4800000000)
        file.write(np.arange(11, 16, dtype="<i4").tobytes())
    assert IndexedReader(tmp_path / "x").read(2).tolist() == [11, 12, 13, 14, 15]
    merged = merge([tmp_path / "x", tmp_path / "x"], tmp_path / "y")
    assert merged.read(5).tolist() == merged.read(2).tolist() == [11, 12, 13, 14, 15]
    assert merged.pointers[5] == 9600000040 - 20 and merged.tokens == 2400000010
    assert os.stat(tmp_path / "y.bin").st_blocks * 512 < 1 << 20  # still sparse: the test needs no 10 GB


@pytest.mark.parametrize("shuffle", ["epochs", "together"])
def test_d02_sample_index_of_many_epochs(tmp_path, shuffle):
    ids = np.arange(60000, dtype=np.uint16)
    reader = IndexedReader(write(tmp_path / "x", np.split(ids, 3), np.uint16))
    dataset = GPTDataset(reader, sequence=2048, samples=1100000, shuffle=shuffle)
    assert dataset.epochs > 37000
    for i in (0, 1048575, 1048576, *range(1099990, 1100000)):
        tokens = dataset[i].tokens
        assert tokens.shape == (2049,) and 0 <= tokens.min() and tokens.max() < 60000
    assert dataset._order.dtype == np.int32 and _index_dtype(2**31 - 1) == np.int32 and _index_dtype(2**31) == np.int64


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("end", [True, False])
def test_d03_empty_documents(tmp_path, workers, end):
    (tmp_path / "a.jsonl").write_text('{"text":""}\n\n{"text":"   "}\n{"text":"abc"}\n{"text":""}')
    summary = prepare([tmp_path / "a.jsonl"], tmp_path / "x", "bytes", append_end=end, workers=workers)
    reader = IndexedReader(tmp_path / "x")
    assert (summary.outputs[0].documents, summary.outputs[0].empty, reader.documents) == (1, 3, 1)
    assert reader.read(0).tolist() == [97, 98, 99] + [256] * end


def test_d03_only_empty_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text":""}\n\n{"text":" "}\n')
    with pytest.raises(UserError, match="no content for 'text': 2 empty documents"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "x", "bytes")
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_d03_blank_lines_at_the_end_of_a_real_file(tmp_path):
    path = shared("text/llamafactory/v1_multimodal_demo.jsonl")
    with pytest.raises(UserError, match=f"{path.name}:1: 'messages' is a list"):
        prepare([path], tmp_path / "x", "bytes", keys=["messages"])
    text = path.read_text()
    (tmp_path / "a.jsonl").write_text(text.replace('{"messages": ', '{"text": "x", "messages": '))
    assert prepare([tmp_path / "a.jsonl"], tmp_path / "x", "bytes").outputs[0].documents == len(
        text.strip().splitlines()
    )


@pytest.mark.parametrize("name", ["bytes", "llama2_sp"])
def test_d04_length_includes_the_end(tmp_path, name):
    tokenizer = load_tokenizer(name if name == "bytes" else shared(f"tokenizers/{name}"))
    prepare([shared(C4)], tmp_path / "x", tokenizer)
    reader, expected = IndexedReader(tmp_path / "x"), lines(shared(C4))
    assert reader.lengths.sum() * reader.dtype.itemsize == os.path.getsize(tmp_path / "x.bin")
    assert reader.documents == len(expected) == 300
    for document, text in enumerate(expected):
        tokens = reader.read(document).tolist()
        assert tokens.index(tokenizer.end_of_document) == len(tokens) - 1
        assert tokenizer.decode(tokens[:-1]) == text


def test_d05_no_setting_drops_output(tmp_path):
    records = json.loads(shared(ALPACA).read_text())[:120]
    found = set()
    for parts in (1, 2, 3):
        folder = tmp_path / f"in{parts}"
        folder.mkdir()
        for part in range(parts):
            size = len(records) // parts
            (folder / f"{part}.json").write_text(json.dumps(records[part * size : (part + 1) * size]))
        for workers in (1, 2, 4):
            prefix = tmp_path / f"x{parts}{workers}"
            summary = prepare([folder], prefix, "bytes", keys=["input", "output"], workers=workers)
            assert [IndexedReader(output.prefix).documents for output in summary.outputs] == [
                o.documents for o in summary.outputs
            ]
            assert [o.documents + o.empty for o in summary.outputs] == [120, 120]
            found.add(
                tuple(
                    (tmp_path / f"{prefix}_{key}{s}").read_bytes()
                    for key in ("input", "output")
                    for s in (".bin", ".idx")
                )
            )
    assert len(found) == 1


@pytest.mark.parametrize("vocab", [65499, 65500, 65535, 65536, 65537, 100008])
def test_d06_storage_holds_every_id(tmp_path, vocab):
    ids = sorted({0, 32767, 32768, vocab - 1, *([65535] if vocab > 65535 else [])})
    with IndexedWriter(tmp_path / "x", token_dtype(vocab)) as writer:
        writer.add(ids)
    reader = IndexedReader(tmp_path / "x")
    assert reader.read(0).tolist() == ids
    check_vocabulary(reader, 100008)  # the dtype is that of the file, whatever vocabulary the run has


def test_d07_ids_outside_the_vocabulary_are_found_before_training(tmp_path):
    for token in (259, 100000):
        reader = IndexedReader(write(tmp_path / "x", [[1, 2, 3], [4, token, 5]]))
        with pytest.raises(UserError, match=f"x, document 1: token id {token} is outside the vocabulary of 259"):
            check_vocabulary(reader, 259)


def test_d09_samples_share_no_memory(tmp_path):
    dataset = GPTDataset(IndexedReader(write(tmp_path / "x", [range(20), range(20)])), sequence=5)
    before = [dataset[i] for i in (0, 1, 0, 1)]
    copies = [(sample.tokens.copy(), sample.starts.copy()) for sample in before]
    for sample in before:
        sample.tokens[:], sample.starts[:] = -1, -1
    for (tokens, starts), i in zip(copies, (0, 1, 0, 1)):
        assert np.array_equal(dataset[i].tokens, tokens) and np.array_equal(dataset[i].starts, starts)


def test_d10_document_starts_follow_the_end_tokens(tmp_path):
    """Also where the end-of-document id does not occur, or occurs inside a document."""
    rng = np.random.RandomState(0)
    for end in (True, False):
        documents = [[*rng.randint(0, 5, rng.randint(1, 9)), *([9] if end else [])] for _ in range(40)]
        dataset = GPTDataset(IndexedReader(write(tmp_path / f"x{end}", documents)), sequence=11)
        for i in range(len(dataset)):
            sample = dataset[i]
            pieces = [piece.tolist() for piece in np.split(sample.tokens, sample.starts[1:])]
            inner = pieces[1:-1]
            assert all(piece in documents for piece in inner) and sample.starts[0] == 0
            if end:
                assert sample.starts[1:].tolist() == (np.flatnonzero(sample.tokens[:-1] == 9) + 1).tolist()
    crossing = write(tmp_path / "y", [[1, 2, 3, 4], [5, 6, 7, 8]])
    first = GPTDataset(IndexedReader(crossing), sequence=4)[0]
    assert first.starts.tolist() == [0, 4]  # only the last label is of the second document


def node_worker(prefix, cache, results):
    build = gpt.epoch_index

    def slow(*arguments):
        (cache.parent / f"built-{cache.name}-{os.getpid()}").touch()
        time.sleep(0.5)
        return build(*arguments)

    gpt.INDEX["epochs"] = slow
    dataset = GPTDataset(IndexedReader(prefix), sequence=8, samples=200, seed=5, cache=cache)
    results.put([dataset[i].tokens.sum().item() for i in range(0, 200, 20)])


@pytest.mark.parametrize("disks", [1, 2])
def test_d12_every_node_gets_its_index(tmp_path, disks):
    """Four processes on two nodes, with a disk for all or one for each node; the builder is slow."""
    prefix = write(tmp_path / "x", [np.arange(d, d + 30) for d in range(9)])
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=node_worker, args=(prefix, tmp_path / f"disk{r // 2 % disks}", results))
        for r in range(4)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert found == [found[0]] * 4 and len(list(tmp_path.glob("built-*"))) == disks


def global_order(prefix, ranks, samples, seed=0, batch=2):
    """Samples in the order of the steps, read by `ranks` ranks that each take their part of every batch."""
    datasets = [GPTDataset(IndexedReader(prefix), sequence=6, samples=samples, seed=seed) for _ in range(ranks)]
    return [tuple(datasets[i % batch * ranks // batch][i].tokens.tolist()) for i in range(samples)]


def test_d13_epochs_are_different_permutations(tmp_path):
    prefix = write(tmp_path / "x", [np.arange(61)])  # 10 samples of 6
    order = global_order(prefix, 1, 30)
    epochs = [order[0:10], order[10:20], order[20:30]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2]) and len(set(epochs[0])) == 10
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert order == global_order(prefix, 2, 30) == global_order(prefix, 1, 30)
    assert order != global_order(prefix, 1, 30, seed=1)


def test_d15_order_does_not_know_the_ranks(tmp_path):
    prefix = write(tmp_path / "x", [np.arange(40), np.arange(100, 121)])
    assert global_order(prefix, 4, 24, batch=4) == global_order(prefix, 2, 24, batch=4)


def test_d16_corpus_shorter_than_the_run(tmp_path):
    reader = IndexedReader(write(tmp_path / "x", [np.arange(31)]))  # 5 samples of 6
    with pytest.raises(UserError, match="needs 12 samples, has 5"):
        GPTDataset(reader, sequence=6, samples=12, wrap=False)
    wrapped = GPTDataset(reader, sequence=6, samples=12, wrap=True)
    assert (len(wrapped), wrapped.samples_per_epoch, wrapped.epochs) == (12, 5, 3)
    first = [wrapped[i].tokens.tolist() for i in range(5)]
    assert sorted(first) == sorted(wrapped[i].tokens.tolist() for i in range(5, 10))
    exact = GPTDataset(reader, sequence=6, samples=5, wrap=False)
    assert exact.epochs == 1 and [exact[i].tokens.tolist() for i in range(5)] == first


@pytest.mark.parametrize("name", ["llama2_sp", "titan_test"])
@pytest.mark.parametrize("begin", [True, False])
@pytest.mark.parametrize("end", [True, False])
def test_d17_exactly_the_specials_asked_for(tmp_path, name, begin, end):
    tokenizer = load_tokenizer(shared(f"tokenizers/{name}"))
    (tmp_path / "a.jsonl").write_text('{"text": "hi"}\n' * 2)
    prepare([tmp_path / "a.jsonl"], tmp_path / "x", tokenizer, append_end=end, prepend_begin=begin)
    plain = {"llama2_sp": [7251], "titan_test": tokenizer.encode("hi")}[name]  # 7251: "▁hi" of the reference model
    expected = [tokenizer.begin] * begin + plain + [tokenizer.end_of_document] * end
    reader = IndexedReader(tmp_path / "x")
    assert [reader.read(i).tolist() for i in range(2)] == [expected] * 2
    assert not {tokenizer.begin, tokenizer.end_of_document} & {*plain}


@pytest.fixture
def malformed(tmp_path):
    records = [json.dumps({"text": f"document {i}"}) for i in range(1, 11)]
    records[2], records[4], records[6] = '{"text": "x"} {"text": "y"}', '{"txt": "x"}', '{"text": "\\ud800"}'
    (tmp_path / "a.jsonl").write_text("\n".join(records))
    return tmp_path / "a.jsonl"


def test_d18_malformed_line_stops_with_its_place(tmp_path, malformed):
    with pytest.raises(UserError, match="a.jsonl:3: not JSON .Extra data"):
        prepare([malformed], tmp_path / "x", "bytes", workers=4)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_d18_malformed_lines_are_skipped_with_a_count(tmp_path, malformed):
    summary = prepare([malformed], tmp_path / "x", "bytes", workers=4, on_error="skip")
    assert summary.malformed == 3 and [fault.split(":")[1] for fault in summary.faults] == ["3", "5", "7"]
    assert IndexedReader(tmp_path / "x").documents == summary.outputs[0].documents == 7


def test_d19_vocabulary_and_merges_that_do_not_belong_together():
    with pytest.raises(UserError, match="'Ġg azed', needs the token 'Ġgazed' that vocab.json lacks"):
        load_tokenizer(shared("tokenizers/gpt2"))


def test_d19_end_of_document_comes_from_the_file(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "<|endoftext|>": 1, "b": 2, "ab": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.end_of_document, tokenizer.vocab_size, tokenizer.encode("abb")) == (1, 4, [3, 2])


def test_d20_vocabulary_size_counts_added_tokens(tmp_path):
    tokenizer = hf.Tokenizer(hf.models.WordLevel({str(i): i for i in range(32000)}, unk_token="0"))
    tokenizer.add_special_tokens(["<a>", "<b>"])
    tokenizer.add_tokens(["<c>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).vocab_size == 32003


def test_tokenizer_that_does_not_match_the_data(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    prepare([tmp_path / "a.txt"], tmp_path / "x", "bytes")
    check_tokenizer(IndexedReader(tmp_path / "x"), load_tokenizer("bytes"))
    with pytest.raises(UserError, match="prepared with tokenizer bytes"):
        check_tokenizer(IndexedReader(tmp_path / "x"), load_tokenizer(shared("tokenizers/llama2_sp")))


def private_bytes():
    """Memory of this process alone (USS)."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's memory accounting")
def test_r01_reading_does_not_grow(tmp_path):
    """20000 samples from all over a file of 2 GB: the memory of the process alone grows by less than 50 MB."""
    documents, length = 1000, 1 << 20
    starts = np.arange(documents + 1)
    write_index(tmp_path / "x", [length] * documents, starts[:-1] * length * 2, starts, [], dtype="<u2")
    os.truncate(tmp_path / "x.bin", documents * length * 2)
    reader, rng = IndexedReader(tmp_path / "x"), np.random.RandomState(0)
    for i in range(20000):
        reader.read(rng.randint(documents), rng.randint(length - 512), 512)
        if i == 2000:
            before = private_bytes()
    assert private_bytes() - before < 50e6


R05 = """
import resource, sys
from mtmegatron.data.prepare import prepare
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
output, = prepare([sys.argv[1]], sys.argv[2], "bytes", append_end=False).outputs
print(output.documents, output.tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_r05_memory_does_not_grow_with_documents(tmp_path):
    """2 million one-token documents in 30 MB: Python objects for each would take 100 bytes each, 200 MB."""
    count = 2_000_000
    (tmp_path / "a.jsonl").write_text('{"text":"x"}\n' * count)
    command = [sys.executable, "-c", R05, str(tmp_path / "a.jsonl"), str(tmp_path / "x")]
    documents, tokens, kilobytes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert (int(documents), int(tokens)) == (count, count)
    assert int(kilobytes) < 30_000
    assert IndexedReader(tmp_path / "x").pointers[-1] == 2 * (count - 1)
